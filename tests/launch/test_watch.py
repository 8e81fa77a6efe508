"""A served ring, seen from another shell: four ranks under mpirun with TRTLLM_PP_PROGRESS=1 alone.

The ring is the host executor with receivers that are late: what driving is worth shows there.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import standin
from jobs import ROOT, no_rank
from standin import TESTS

from trtllm_pp_progress.door.client import ask
from trtllm_pp_progress.tools.watch.ab import LEASE_MARGIN_S

SCRIPT = Path(__file__).parent / "scripts" / "ring.py"
SOURCE = """
from trtllm_pp_progress.tools.host import HostExecutor


class PyExecutor(HostExecutor):
    pass
"""
RANKS = 4
LIMIT_S = 100  # only a fault makes a wait reach it

pytestmark = pytest.mark.timeout(300)


class Ring:
    """A ring that serves, and the folder of its doors."""

    def __init__(self, folder, job):
        self.folder, self.job = folder, job
        self.doors = folder / f"trtllm-pp-progress-{os.getuid()}"

    def await_(self, condition):
        """Return once it holds; fail where the ring ended before."""
        limit = time.monotonic() + LIMIT_S
        while not condition():
            assert self.job.poll() is None, (self.folder / "output").read_text()
            assert time.monotonic() < limit, (self.folder / "output").read_text()
            time.sleep(0.02)

    def command(self, *arguments):
        """Start a command of the package, as from another shell."""
        line = [sys.executable, "-m", "trtllm_pp_progress", *map(str, arguments)]
        return subprocess.Popen(line, cwd=ROOT, env=no_rank(TMPDIR=str(self.folder)), stdout=subprocess.PIPE, text=True)

    def said(self, *arguments):
        """Return what a command prints, as JSON."""
        with self.command(*arguments) as command:
            output, _ = command.communicate(timeout=LIMIT_S)
        assert command.returncode == 0
        return json.loads(output)

    def off(self):
        """Return whether driving is off, by rank."""
        found = {}
        for path in self.doors.glob("*.sock"):
            for target in ask(path, timeout_s=LIMIT_S)["tensorrt_llm"]["installed"]:
                found |= {one["rank"]: one["off"] for one in target["executors"]}
        return found

    def end(self):
        """Let it end, and return each rank's own count: when, and how many sends by then."""
        (self.folder / "end").touch()
        self.job.wait(LIMIT_S)
        assert self.job.returncode == 0, (self.folder / "output").read_text()
        return [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


@contextmanager
def serving(python, **variables):
    """Give a ring that serves; its doors are in a folder of a short name: a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        standin.write(folder / "upstream", SOURCE)
        path = os.pathsep.join(map(str, (folder / "upstream", TESTS)))
        env = no_rank(PYTHON=str(python), PYTHONPATH=path, TMPDIR=name, **variables)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [f"{sys.prefix}/lib", env.get("LD_LIBRARY_PATH")]))
        line = ["bash", ROOT / "ci" / "mpi.sh", str(RANKS), "280", SCRIPT, name]
        with open(folder / "output", "w") as output:
            job = subprocess.Popen(line, cwd="/", env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            ring = Ring(folder, job)
            ring.await_((folder / "serves").exists)
            yield ring
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(LIMIT_S)


@pytest.fixture(scope="module", autouse=True)
def _no_runtime_directory():
    """Doors are in TMPDIR only where the user has no runtime directory."""
    if Path(f"/run/user/{os.getuid()}").is_dir():
        pytest.skip("doors of this user are in /run/user, which these tests leave alone")


def by_then(counts, when):
    """Return how many sends there were by a time, between two notes of it."""
    for (before, few), (after, many) in itertools.pairwise(counts):
        if before <= when <= after:
            return few + (many - few) * (when - before) / (after - before)
    raise AssertionError(f"nothing was noted around {when}")


def test_a_ring_is_seen_as_it_counts_itself(places):
    """Four ranks with their era, and sends a second to ten percent; nothing is left of it at its end."""
    with serving(places.python, TRTLLM_PP_PROGRESS="1") as ring:
        seen = ring.said("watch", "--once", "--json", "--period", "4")
        own = ring.end()
        assert list(ring.doors.iterdir()) == []
    assert [line["rank"] for line in seen["rings"]] == [0, 1, 2, 3]
    assert {line["era"] for line in seen["rings"]} == {"E2"}
    assert len({line["pid"] for line in seen["rings"]}) == RANKS
    until, window_s = seen["until"], seen["window_s"]
    for line, counts in zip(seen["rings"], own, strict=True):
        rate = (by_then(counts, until) - by_then(counts, until - window_s)) / window_s
        assert line["sends_per_s"] == pytest.approx(rate, rel=0.1)


def test_without_the_variable_there_is_nobody(places):
    """Control: the same ring has no door, and watch says so by its exit code."""
    with serving(places.python) as ring:
        with ring.command("watch", "--once", "--json", "--period", "0.2") as command:
            output, _ = command.communicate(timeout=LIMIT_S)
        ring.end()
    assert command.returncode == 1
    assert json.loads(output)["rings"] == []


def test_ab_shows_the_loss_and_ends_with_driving_on(places):
    """While off each late receiver costs up to a re-entry; killed in its off phase, the lease turns driving on."""
    period = 3
    with serving(places.python, TRTLLM_PP_PROGRESS="1") as ring:
        found = ring.said("ab", "--seconds", "12", "--period", period, "--json")
        assert set(ring.off().values()) == {False}
        with ring.command("ab", "--seconds", "600", "--period", period) as command:
            ring.await_(lambda: set(ring.off().values()) == {True})
            command.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert set(ring.off()) == {0, 1, 2, 3}
        ring.await_(lambda: set(ring.off().values()) == {False})
        took = time.monotonic() - killed
        ring.end()
    assert took < period + LEASE_MARGIN_S + 2  # of asking
    off, on = (statistics.median(found[kind]["sends_per_s"]) for kind in ("off", "on"))
    assert on > 1.2 * off
    assert found["off"]["parked_ms_p50"] == []
    assert all(found["on"]["parked_ms_p50"])
