"""The ways in under mpirun: pools whose workers get their variables late, a leader that hides MPI from a command."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import standin
from standin import TESTS, run

SCRIPTS = Path(__file__).parent / "scripts"
NOW, LATE = {"TRTLLM_PP_PROGRESS": "1"}, {"LATE_TRTLLM_PP_PROGRESS": "1"}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """Return a folder with the stand-in."""
    return standin.write(tmp_path_factory.mktemp("upstream"))


@pytest.fixture
def mpirun(upstream, tmp_path):
    """Return the function that runs a command on ranks and returns what each process of it reported."""
    beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    launcher = shutil.which("mpirun", path=beside)

    def start(ranks, *command, path=(), **variables):
        reports = tmp_path / "reports"
        reports.mkdir()
        variables |= {
            "REPORTS": str(reports),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        env = standin.environment(*path, upstream, TESTS, **variables)
        run(["timeout", "--kill-after=10", "80", launcher, "-n", str(ranks), "--oversubscribe", *command], env)
        return [json.loads(file.read_text()) for file in sorted(reports.iterdir())]

    return start


def outcome(found):
    """Return, for each process, whether it was patched, and once."""
    return [(report["patched"], report["once"]) for report in found]


@pytest.mark.parametrize(
    ("variables", "patched"), [(NOW, True), (LATE, True), ({}, False)], ids=["before", "late", "never"]
)
@pytest.mark.parametrize("shared", [False, True], ids=["spawned", "python -m mpi4py.futures"])
def test_workers_of_a_pool_are_patched(shared, variables, patched, mpirun, places):
    """By the .pth, also where the pool writes the variable into os.environ of a worker that runs already."""
    module = ["-m", "mpi4py.futures"] if shared else []
    found = mpirun(3 if shared else 1, places.python, *module, SCRIPTS / "pool.py", **variables)
    assert outcome(found) == [(patched, patched or report["once"]) for report in found]
    assert len(found) == 2


def test_workers_of_a_pool_that_the_launcher_started_are_patched(mpirun, places):
    """From a plain folder, without the .pth: what is spawned inherits PYTHONPATH."""
    launcher = [places.bare_python, "-m", "trtllm_pp_progress", "run", "--"]
    found = mpirun(1, *launcher, places.bare_python, SCRIPTS / "pool.py", path=[places.folder])
    assert outcome(found) == [(True, True)] * 2


@pytest.mark.parametrize("way", ["pth", "pth, late", "launcher"])
def test_a_leader_its_workers_and_the_hidden_command_are_patched(way, mpirun, places):
    """Three ranks and the command of rank 0, which sees none of MPI's variables; each process once."""
    python = places.bare_python if way == "launcher" else places.python
    command = [python, "-c", "import report"]
    line = ["bash", SCRIPTS / "leader.sh", python, SCRIPTS / "ranked_worker.py", *command]
    if way == "launcher":
        launcher = [python, "-m", "trtllm_pp_progress", "run", "--"]
        found = mpirun(3, *launcher, *line, path=[places.folder])
    else:
        found = mpirun(3, *line, **(LATE if "late" in way else NOW))
    by_rank = {report["rank"]: (report["patched"], report["once"]) for report in found}
    ranks = dict.fromkeys(["0", "1", "2"], (True, True))
    assert len(found) == 4
    # Late variables reach the ranks by a message; the command is not one of them.
    assert by_rank == ranks | {None: (True, True) if "late" not in way else (False, True)}
