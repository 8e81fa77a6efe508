"""`trtllm-pp-progress probe` under an mpirun: its verdict on fabrics that are known, and no hang that it does not end.

Open MPI and MPICH over UCX: TCP parks what is large (MPICH 5.0.2: from 259,132 bytes on), posix shared memory moves.
"""

import json

import pytest
from jobs import alone

PROBE = ["-m", "trtllm_pp_progress", "probe", "--sizes", "256,1000000"]
KEYS = {"bytes", "wire_ms", "isend_ms", "away_ms", "waited_ms", "moves", "driven_ms", "polls"}


def found(path):
    """Return the only link of the only run, and the whole."""
    written = json.loads(path.read_text(encoding="utf-8"))
    (run,) = written["runs"]
    (link,) = run["links"]
    return link, written


def test_over_tcp_a_large_send_parks_and_the_edge_is_found(job, tmp_path):
    """Exit code 1; below the edge sends move, from the edge on they park; documented keys."""
    path = tmp_path / "probe.json"
    done = job(2, 100, *PROBE, "--json", path)
    assert done.rc == 1, done.output
    link, written = found(path)
    assert (written["verdict"], written["exit_code"], written["problem"]) == ("parks", 1, "")
    edge = link["edge_bytes"]
    assert 256 < edge < 1_000_000
    rows = {row["bytes"]: row for row in link["rows"]}
    assert sorted(rows) == [256, edge - 1, edge, edge + 1, 1_000_000]
    assert {size: row["moves"] for size, row in rows.items()} == {
        256: True,
        edge - 1: True,
        edge: False,
        edge + 1: False,
        1_000_000: False,
    }
    for row in rows.values():
        assert set(row) == KEYS
        assert row["polls"] >= 1
    assert rows[1_000_000]["driven_ms"] < rows[1_000_000]["waited_ms"]
    assert f"rendezvous from {edge:,} bytes on" in done.output
    assert "PARKS: sends of" in done.output


@pytest.mark.parametrize(
    ("environment", "size"),
    [({"FABRIC": "posix,self"}, 65536), ({"UCX_RNDV_THRESH": "inf"}, 1_000_000)],
    ids=["posix shared memory", "everything eager"],
)
def test_a_fabric_that_moves_by_itself_is_told(job, tmp_path, environment, size):
    """Exit code 0: the patch has nothing to do. Without CMA shared memory parks as well, but from 238,622 bytes on."""
    path = tmp_path / "probe.json"
    done = job(2, 100, *PROBE, "--sizes", f"256,{size}", "--json", path, **environment)
    assert done.rc == 0, done.output
    link, written = found(path)
    assert written["verdict"] == "moves"
    assert link["edge_bytes"] is None
    assert [row["bytes"] for row in link["rows"]] == [256, size]
    assert all(row["moves"] for row in link["rows"])
    assert f"eager up to {size:,} bytes" in done.output
    said = written["runs"][0]["environment"]
    assert environment.items() <= {"FABRIC": said["UCX_TLS"], **said}.items()


def test_it_starts_mpirun_itself_and_tells_one_transport_from_the_other(tmp_path):
    """One row of tables each; the worst is the exit code."""
    path = tmp_path / "probe.json"
    command = ["-m", "trtllm_pp_progress", "probe", "--transport", "tcp,default", "--sizes", "300000"]
    done = alone(110, *command, "--json", path)
    assert done.returncode == 1, done.stdout
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [run["transport"] for run in written["runs"]] == ["tcp", "default"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "it was ended by SIGKILL in 'rank 0 to rank 1: 100,000 bytes'"),
        ("raises", "it failed in 'rank 0 to rank 1: 100,000 bytes' with exit code 70"),
        ("stopped", "it did not get through 'rank 0 to rank 1: 100,000 bytes' within 5 s"),
        ("held", "it did not get through 'rank 0 to rank 1: 100,000 bytes' within 5 s"),
    ],
)
def test_a_rank_that_fails_is_exit_code_2_with_the_step_named(job, tmp_path, how, said):
    """Never a hang, never taken for a verdict; the file says so, too."""
    path = tmp_path / "probe.json"
    options = ["--sizes", "5000,100000", "--step-timeout", 5, "--json", path]
    done = job(2, 60, "tests/launch/scripts/broken_probe.py", how, *options)
    assert done.rc == 2, done.output
    assert said in done.output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["verdict"] == "cannot tell"
    assert said in written["problem"]


def test_one_rank_alone_can_tell_nothing(job):
    """Exit code 2, and how to start it."""
    done = job(1, 60, *PROBE)
    assert done.rc == 2, done.output
    assert "this is the only rank of its job, and 2 or more are needed" in done.output
