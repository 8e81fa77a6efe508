"""The probe without MPI: which links it measures, what its report says, and what its mpiruns add up to."""

import io
import json
import os
import subprocess
import sys

import pytest

from trtllm_pp_progress import cli
from trtllm_pp_progress.tools.probe import rank as _rank
from trtllm_pp_progress.tools.probe import start as _start
from trtllm_pp_progress.tools.probe import table as _report

ROW = {
    "bytes": 65536,
    "wire_ms": 0.1,
    "isend_ms": 0.05,
    "away_ms": 150.0,
    "waited_ms": 151.0,
    "moves": False,
    "driven_ms": 0.2,
    "polls": 40.0,
}


@pytest.mark.parametrize(
    ("hosts", "links"),
    [
        ("aa", [(0, 1)]),
        ("ab", [(0, 1), (1, 0)]),
        ("aabb", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        ("aaaa", [(0, 1)]),
        ("abcd", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        ("abab", [(0, 1), (1, 2)]),
    ],
)
def test_one_link_of_the_ring_for_every_two_hosts(hosts, links):
    """A job whose sends park on some nodes only is seen to; links that are alike are measured once."""
    assert _rank.links(hosts) == links


def run(**changes):
    """Return a run with one row."""
    link = {"sender": 0, "receiver": 1, "hosts": ["a", "a"], "edge_bytes": 8193, "rows": [ROW | changes]}
    return {"transport": "tcp", "environment": {"mpi": "X"}, "links": [link]}


def printed(found, problem=""):
    """Return what is printed of a run."""
    file = io.StringIO()
    _report.print_run(found, problem, file)
    return file.getvalue()


def test_a_parked_send_is_named_with_what_the_patch_would_buy():
    """The table has the edge, the size and the wait that goes away."""
    out = printed(run())
    assert "rendezvous from 8,193 bytes on" in out
    assert "PARKS: sends of 65,536 bytes and more" in out
    assert "151 of 150" in out
    assert "isend itself" not in out


def test_a_send_that_moves_is_left_alone():
    """Nothing to buy."""
    out = printed(run(moves=True, waited_ms=0.3))
    assert "MOVES: every send arrived" in out
    assert "PARKS" not in out


def test_an_isend_that_blocks_is_named():
    """Above 1 ms it is not non-blocking."""
    assert "isend itself took 20.5 ms" in printed(run(isend_ms=20.5, moves=True))


def test_a_problem_is_the_last_word():
    """A wrong payload leaves nothing to be told."""
    assert "CANNOT TELL: not what was sent" in printed(run(), "not what was sent")


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Stand in for mpirun: each launch takes the next (exit code, problem), and writes what a rank would."""
    planned = []

    def launch(ranks, transport, arguments, timeout_s):
        code, problem = planned.pop(0)
        assert arguments[2] == "probe"
        if problem is not None:
            path = _start.Path(arguments[arguments.index("--json") + 1])
            _report.write_json(path, [run() | {"transport": transport}], code, problem)
        return code

    monkeypatch.setattr(_start, "launch", launch)
    for variable in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(variable)
    return planned


@pytest.mark.parametrize(
    ("planned", "code", "verdict"),
    [
        ([(0, ""), (0, "")], 0, "moves"),
        ([(0, ""), (1, "")], 1, "parks"),
        ([(1, ""), (2, "rank 1: stuck")], 2, "cannot tell"),
        ([(137, None), (0, "")], 2, "cannot tell"),
    ],
)
def test_the_worst_of_the_mpiruns_is_the_verdict(jobs, tmp_path, planned, code, verdict, capfd):
    """One that parks is enough; one that was killed leaves it open, and the file says which."""
    jobs += planned
    out = tmp_path / "probe.json"
    with pytest.raises(SystemExit) as left:
        cli.main(["probe", "--transport", "tcp,shm", "--json", str(out)])
    assert left.value.code == code
    written = json.loads(out.read_text())
    assert (written["verdict"], written["exit_code"], written["schema"]) == (verdict, code, 1)
    assert [found["transport"] for found in written["runs"]] == [
        name for name, (_, problem) in zip(("tcp", "shm"), planned, strict=True) if problem is not None
    ]
    assert bool(written["problem"]) == (code == 2)
    assert ("ended with exit code 137" in capfd.readouterr().err) == (planned[0][0] == 137)


def test_the_parent_imports_no_mpi():
    """The watchdog forks before MPI is there: nothing that it imports brings MPI along."""
    script = "import sys, trtllm_pp_progress.tools.probe.start; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
