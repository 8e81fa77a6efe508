"""Scenarios over a real MPI: a sync dependency that deadlocks without the patch, and every hindrance in small."""

import json


def test_a_schedule_that_parks_is_driven_although_nobody_re_enters_mpi(script):
    """NVIDIA/TensorRT-LLM#10665: rank 1 waits outside MPI for rank 2, which waits for rank 1's schedule."""
    job = script(4, "dependency", "patched")
    assert job.rc == 0, job.output
    assert "rank 0: tokens 0 1 2 3 4" in job.output
    assert job.output.count("wrong 0") == 4


def test_without_the_patch_it_is_a_deadlock(job):
    """Control: the job's deadline ends it."""
    stuck = job(4, 15, "tests/launch/scripts/dependency.py", "regressed")
    assert stuck.killed, stuck.output
    assert "tokens" not in stuck.output


SCENARIOS = "late_random,uneven,gil_held,gil_held_all,busy,sync_dependency"


def test_every_hindrance_runs_and_nothing_is_wrong(job, tmp_path):
    """Each scenario in small: rows, the floor beside them, and small messages where the main threads exchange them."""
    path = tmp_path / "bench.json"
    options = ["--pp", 2, "--policies", "flush,patched", "--scenarios", SCENARIOS, "--repeat", 1, "--steps", 10]
    done = job(2, 110, "-m", "trtllm_pp_progress", "bench", *options, "--payload", 20000, "--json", path)
    assert done.rc == 0, done.output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [row["scenario"] for row in written["rows"]] == [name for name in SCENARIOS.split(",") for _ in range(2)]
    for row in written["rows"]:
        assert row["wrong"] == 0
        assert row["tokens_per_s"] > 0
        assert (row["small_ms_p50"] is not None) == (row["scenario"] == "busy")
        if row["scenario"].startswith("gil_held"):
            assert row["tokens_per_s"] < 10, "nobody held the GIL for 100 ms a step"
    (floor,) = written["floor"]
    assert floor["payload_bytes"] == 20000
    assert 0 < floor["buffers_ms_p50"] <= floor["buffers_ms_p99"]
    assert 0 < floor["pkl5_ms_p50"] <= floor["pkl5_ms_p99"]
    assert "small ms" in done.output
    assert "floor, plain ping-pong" in done.output
