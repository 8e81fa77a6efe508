"""The performance case on four ranks of a CPU: right tokens with every relay, and no hang where a rank fails."""

import json
import os
import subprocess
import sys

import pytest
from jobs import KILLED, ROOT, on_ranks

from case.names import POLICY_NAMES

CASE = "qwen3_0.6b-bench-pytorch-bfloat16-maxbs:512-maxnt:2048-input_output_len:8000,1000-reqs:256-con:{}-pp:{}-gpus:{}"
PYTHONPATH = os.pathsep.join([str(ROOT / "perf"), str(ROOT)])
WITHOUT_POLLS = ("regressed", "flush", "inline-f", "inline-g")  # they wait, or leave a send alone
LIMIT_S = 240  # only a fault makes a job reach it


def start(ranks, deadline, *arguments, **environment):
    """Run `python ARGUMENTS` on that many ranks; return the exit code and what was written."""
    done = on_ranks(ranks, deadline, *arguments, **{"PYTHONPATH": PYTHONPATH} | environment)
    return done.returncode, done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("concurrency", "pp"), [(1, 4), (4, 2)])
def test_every_relay_gives_the_unsplit_models_tokens(tmp_path, concurrency, pp):
    """One request at a time and batches in flight together; each run leaves what its pictures are made of."""
    result = tmp_path / "result.json"
    case = CASE.format(concurrency, pp, pp)
    options = ["--engine", "host-cpu", "--output", 12, "--scale", 0.003, "--host-work-ms", 0.5, "--json", result]
    policies = ["regressed", "flush", "oneshot", "iprobe", "patched"] if concurrency == 1 else POLICY_NAMES
    options += ["--policies", ",".join(policies)]
    rc, output = start(pp, LIMIT_S, "perf/test_perf.py", case, *options)
    assert rc == 0, output
    written = json.loads(result.read_text())
    assert written["failures"] == []
    assert written["compared_tokens"] == 12 * written["batch"]
    assert list(written["rows"]) == list(policies)
    assert "input 24 instead of 8000" in written["scaled"]
    assert "input 24 instead of 8000" in output
    for policy, runs in written["rows"].items():
        assert len(runs) == 1
        assert runs[0]["wrong"] == 0
        assert (runs[0]["polls_per_step"] > 0) == (policy not in WITHOUT_POLLS)
        assert runs[0]["shown"]
        assert sum(runs[0]["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert all(hop["received"] >= hop["posted"] for step in runs[0]["shown"] for hop in step["hops"])
    assert "one step of the ring" in output


@pytest.mark.timeout(600)
def test_it_runs_under_pytest_and_a_wrong_stage_fails_it(tmp_path):
    """Negative control: with one rank's weights from another seed, every rank's test fails, and says why."""
    script = tmp_path / "planted.py"
    script.write_text(
        "import os\n"
        "from decoder import weights\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "    original = weights.RandomWeights.__init__\n"
        "    weights.RandomWeights.__init__ = lambda self, seed: original(self, seed + 1)\n"
    )
    options = "--engine host-cpu --output 12 --scale 0.003 --policies flush"
    test = f"perf/test_perf.py::test_perf[{CASE.format(1, 2, 2)}]"
    line = ["-m", "pytest", "-q", "-p", "no:hypothesispytest", f"--perf={options}", test]
    rc, output = start(2, LIMIT_S, *line)
    assert rc == 0, output
    line[2:2] = ["-p", "planted"]
    rc, output = start(2, LIMIT_S, *line, PYTHONPATH=os.pathsep.join([str(tmp_path), PYTHONPATH]))
    assert rc not in (0, KILLED), output
    assert "flush: tokens are not the unsplit model's" in output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["sampled", "launch", "check"])
def test_a_failing_rank_ends_the_run_for_all(tmp_path, where):
    """An error on one rank, on the executor's or the relay's way, is shown, and nobody waits for that rank."""
    script = tmp_path / "failing.py"
    script.write_text(
        "import os\n"
        "import test_perf\n"
        "from case import stage\n"
        "def fails(self, *arguments):\n"
        "    raise OSError('planted')\n"
        f"rank = '1' if {where!r} == 'sampled' else '0'\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == rank:\n"
        f"    setattr(stage.CaseStage, {where!r}, fails)\n"
        "test_perf.run_command(test_perf.command)\n"
    )
    options = ["--engine", "host-cpu", "--output", 12, "--scale", 0.003, "--policies", "flush,patched"]
    rc, output = start(2, LIMIT_S, script, CASE.format(1, 2, 2), *options)
    assert rc not in (0, KILLED), output
    assert "planted" in output


@pytest.mark.timeout(300)
def test_a_rank_that_never_answers_is_ended_by_the_deadline(tmp_path):
    """Control for the test above: without an error only the deadline helps, and it shows where each thread was."""
    script = tmp_path / "stuck.py"
    script.write_text(
        "import os, threading\n"
        "import test_perf\n"
        "from case import stage\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "    stage.CaseStage.sampled = lambda self: threading.Event().wait()\n"
        "test_perf.run_command(test_perf.command)\n"
    )
    options = ["--engine", "host-cpu", "--output", 12, "--scale", 0.003, "--policies", "flush", "--timeout", 15]
    rc, output = start(2, LIMIT_S, script, CASE.format(1, 2, 2), *options)
    assert rc not in (0, KILLED), output
    assert "Timeout (0:00:15)" in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "tells"),
    [
        (["nonsense"], "case 'nonsense' has 1 parts instead of 11"),
        ([CASE.format(1, 4, 4), "--engine", "host-gpu"], "engine 'host-gpu' cannot run here: torch finds no GPU"),
        ([CASE.format(1, 4, 4), "--engine", "host-cpu", "--policies", "inline"], "unknown policy 'inline'"),
    ],
)
def test_bad_input_is_one_line(arguments, tells):
    """And starts no rank."""
    done = subprocess.run(
        [sys.executable, ROOT / "perf" / "test_perf.py", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert tells in done.stdout
    assert done.stdout.count("\n") == 1
