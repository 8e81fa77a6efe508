"""`python -m trtllm_pp_progress bench` as a user starts it: on its own, and under somebody's mpirun."""

import json
from pathlib import Path

import pytest
from jobs import alone

ROW = {
    "scenario",
    "policy",
    "pp",
    "payload_bytes",
    "tokens_per_s",
    "parked_ms_p50",
    "parked_ms_p99",
    "parked_ms_max",
    "polls_per_step",
    "cpu_cores",
    "wrong",
    "small_ms_p50",
    "raw",
}
SCRIPTS = Path(__file__).parent / "scripts"
BENCH = ["-m", "trtllm_pp_progress", "bench"]


def assert_one_line(rc, output, line):
    """Assert exit code 2 and one clear line, once, without a traceback; the launcher may add its own."""
    assert rc == 2, output
    assert output.count("Error: ") == 1, output
    assert line in output
    assert "Traceback" not in output


@pytest.mark.parametrize("started", [2, 3])
def test_another_number_of_ranks_than_asked_for_is_refused(job, started):
    """Whoever starts mpirun himself is told both numbers."""
    refused = job(started, 60, *BENCH, "--pp", 4)
    assert_one_line(refused.rc, refused.output, f"Error: {started} ranks were started, but --pp is 4")


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_a_thread_level_below_multiple_is_refused(job, level):
    """Relay and executor both call MPI."""
    refused = job(2, 60, *BENCH, "--pp", 2, MPI4PY_RC_THREAD_LEVEL=level)
    assert_one_line(refused.rc, refused.output, "MPI_THREAD_MULTIPLE")


def test_a_missing_launcher_is_said_in_one_line(tmp_path):
    """Neither beside this Python nor on the path."""
    python = str(tmp_path / "python")
    code = f"import sys, trtllm_pp_progress.cli as cli; sys.executable = {python!r}; cli.main(['bench'])"
    done = alone(60, "-c", code, PATH=str(tmp_path))
    assert_one_line(done.returncode, done.stdout, "Error: mpirun was not found")


@pytest.mark.parametrize("own", [True, False])
def test_a_tiny_run_writes_the_documented_rows(job, tmp_path, own):
    """With the launcher that it finds, and as ranks of a launcher that was there before: nothing is wrong."""
    path = tmp_path / "bench.json"
    policies = "regressed,flush,patched"
    options = ["--pp", 2, "--policies", policies, "--repeat", 1, "--steps", 10, "--compute-ms", 1, "--payload", 20000]
    options += ["--reentry-ms", 5, "--json", path]
    if own:
        done = alone(100, *BENCH, *options)
        rc, output = done.returncode, done.stdout
    else:
        done = job(2, 100, *BENCH, *options)
        rc, output = done.rc, done.output
    assert rc == 0, output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["schema"] == 1
    assert written["environment"]["thread_level"] >= 3
    assert [row["policy"] for row in written["rows"]] == policies.split(",")
    assert [floor["payload_bytes"] for floor in written["floor"]] == [20000]
    for row in written["rows"]:
        assert set(row) >= ROW
        assert (row["scenario"], row["pp"], row["payload_bytes"], row["wrong"]) == ("steady", 2, 20000, 0)
        assert row["tokens_per_s"] > 0
        assert 0 <= row["parked_ms_p50"] <= row["parked_ms_p99"] <= row["parked_ms_max"]
        assert len(row["raw"]) == 1
        assert len(row["raw"][0]["ranks"]) == 2
        assert row["policy"] in output


def test_a_rank_that_raises_ends_all_ranks(script):
    """At once, with its traceback."""
    guarded = script(3, "one_fails", "guarded")
    assert guarded.rc not in (0, 124), guarded.output
    assert "RuntimeError: this rank fails" in guarded.output


def test_without_the_guard_its_peers_wait_for_it(job):
    """Control: the deadline has to end them."""
    bare = job(3, 10, SCRIPTS / "one_fails.py", "bare")
    assert bare.killed, bare.output


def test_a_setting_is_measured_beside_the_relays(tmp_path):
    """`eager` has an mpirun of its own, and a row in the same table and file."""
    path = tmp_path / "bench.json"
    options = ["--pp", 2, "--policies", "flush,eager", "--repeat", 1, "--steps", 10, "--reentry-ms", 5, "--json", path]
    done = alone(110, *BENCH, *options)
    assert done.returncode == 0, done.stdout
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(row["policy"], row["wrong"]) for row in rows] == [("flush", 0), ("eager", 0)]
    assert "regressed, UCX_RNDV_THRESH=inf" in done.stdout
    assert "│ eager " in done.stdout
