"""One cell of the fault matrix, on the first host of a bed: start a ring, let something happen to it, and see.

    ci/hosts.sh 2 -- python perf/hosts/cell.py FOLDER '{"fault": ["cut", 5], "moment": "half", "ring": {...}, ...}'

Prints one line of JSON: how it ended, after how many seconds, what the ranks and the patch said.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trtllm_pp_progress.tools.job.launch import command, find_launcher

RING = Path(__file__).with_name("ring.py")
STACKS_S = 2.0  # for them to arrive
LINES = 20  # of a job that ended, told; one that did not has stacks to show
MARK = "ring "  # begins what ring.py says
OURS = re.compile(r"rank \d+: (?!Traceback)(.*)")
KINDS = {  # what the patch says, in short
    "pending": "is pending for",
    "abandoned": "abandoned the send",
    "failed": "failed while closing",
    "left to upstream": "left to upstream's own wait",
    "gone on without": "the next forward goes without it",
    "silences": "nobody drove",
}


class Ring:
    """A job of ranks in the bed, and what it says."""

    def __init__(self, folder: str, ring: dict[str, Any], transport: str) -> None:
        """Start it: as many ranks as `ring` says, over a transport as the bench names them."""
        arguments = [str(RING), folder, json.dumps(ring)]
        line, variables = command(ring["pp"], transport, arguments, *find_launcher())
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            line,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.pids: dict[int, int] = {}
        self.ends: list[dict[str, Any]] = []
        self.wrong = 0
        self.said: collections.Counter[str] = collections.Counter()
        self.lines: list[str] = []
        self._reached: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def await_reached(self, limit_s: float) -> str | None:
        """Return how far it has come next, "" once it has ended, or None where that takes too long."""
        try:
            return self._reached.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            return None

    def show_stacks(self) -> None:
        """Have the ranks that are left write where they are."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_S)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if MARK in line and line.rstrip().endswith("}"):
                self._hear(json.loads(line[line.index(MARK) + len(MARK) :]))
                continue
            self.lines.append(line.rstrip())
            if found := OURS.search(line):
                self.said[next((kind for kind, words in KINDS.items() if words in found[1]), "other")] += 1
        self.process.wait()
        self._reached.put("")

    def _hear(self, words: dict[str, Any]) -> None:
        self.wrong += words.get("wrong", 0) if "rank" not in words else 0
        if "pid" in words:
            self.pids[words["rank"]] = words["pid"]
        elif "rank" in words:
            self.ends.append(words)
        elif "reached" in words:
            self._reached.put(words["reached"])


def afterwards(seconds: float | None, undo: Callable[[], object]) -> None:
    """Undo something after so many seconds, never where that is None, while others go on."""
    if seconds is not None:
        timer = threading.Timer(seconds, undo)
        timer.daemon = True
        timer.start()


def cut(ring: Ring, seconds: float | None) -> None:
    """Cut the second host's link."""

    def link(state: str) -> None:
        subprocess.run([os.environ["HOSTS_ENTER"], "0", "ip", "link", "set", "port2", state], check=True)

    link("down")
    afterwards(seconds, lambda: link("up"))


def stop(ring: Ring, seconds: float | None) -> None:
    """Stop a rank in the middle of the pipeline, on the second host or a later one."""
    pid = ring.pids[len(ring.pids) // 2]
    os.kill(pid, signal.SIGSTOP)
    afterwards(seconds, lambda: os.kill(pid, signal.SIGCONT))


def kill(ring: Ring, seconds: float | None) -> None:
    """Kill that rank."""
    os.kill(ring.pids[len(ring.pids) // 2], signal.SIGKILL)


def kill_daemon(ring: Ring, seconds: float | None) -> None:
    """Kill the launcher's daemon on that rank's host: the rank's parent."""
    state = Path(f"/proc/{ring.pids[len(ring.pids) // 2]}/status").read_text()
    os.kill(int(re.findall(r"^PPid:\s+(\d+)", state, re.M)[0]), signal.SIGKILL)


FAULTS: dict[str, Callable[[Ring, float | None], None]] = {
    "none": lambda ring, seconds: None,
    "cut": cut,
    "stop": stop,
    "kill": kill,
    "kill daemon": kill_daemon,
}


def run(folder: str, fault: tuple[str, float | None], moment: str, deadline_s: float, transport: str, ring: Any) -> Any:
    """Run one cell and return what became of it; the bed's end is the end of what is left."""
    job = Ring(folder, ring, transport)
    ends = job.began + deadline_s
    act, seconds = FAULTS[fault[0]], fault[1]
    for reached in _stations(job, ends):
        if reached == moment:
            act(job, seconds)
        if reached == "all":
            Path(folder, "end").touch()
    took, code = time.monotonic() - job.began, job.process.poll()
    if code is None:
        job.show_stacks()
        job.process.kill()
    # Where its daemon was killed, Open MPI's mpirun ends the ranks, and exits with 0.
    whole = code == 0 and len(job.ends) == ring["pp"]
    return {
        "outcome": "hung" if code is None else "ended" if whole else "aborted",
        "seconds": round(took, 1),
        "code": code,
        "wrong": max(job.wrong, sum(end["wrong"] for end in job.ends)),
        "closed_s": max((end["closed_s"] for end in job.ends), default=None),
        "abandoned": sum(end["abandoned"] for end in job.ends),
        "ranks": len(job.ends),
        "said": dict(job.said),
        "started": len(job.pids),
        "lines": job.lines if code is None else job.lines[-LINES:],
    }


def _stations(job: Ring, ends: float) -> Iterator[str]:
    """Give how far the ring has come, until it has ended or the deadline is there."""
    while reached := job.await_reached(ends - time.monotonic()):
        yield reached


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], **json.loads(sys.argv[2]))))
