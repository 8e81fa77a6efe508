"""The ways in under mpirun: pools whose workers get their variables late, a leader that hides MPI from a command."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import standin
from standin import TESTS, run

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
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

    def start(ranks, *command, path=(), before=(), **variables):
        reports = tmp_path / "reports"
        reports.mkdir()
        variables |= {
            "REPORTS": str(reports),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        env = standin.environment(*path, upstream, TESTS, **variables)
        run(["timeout", "--kill-after=10", "80", *before, launcher, "-n", str(ranks), "--oversubscribe", *command], env)
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


@pytest.mark.parametrize("variables", [NOW, LATE, {}], ids=["before", "late", "by the code"])
def test_case_84_workers_that_are_started_by_code_of_upstreams_are_patched(variables, mpirun, places):
    """NVIDIA/TensorRT-LLM#17233: `python -c` in the place of mpi4py's own server, which may set the variable itself."""
    code = "import runpy; runpy.run_module('mpi4py.futures.server', run_name='__main__', alter_sys=True)"
    if not variables:
        code = f"import os; os.environ['TRTLLM_PP_PROGRESS'] = 'true'; {code}"
    found = mpirun(1, places.python, SCRIPTS / "pool.py", BOOTSTRAP=code, **variables)
    assert outcome(found) == [(True, True)] * 2


def test_workers_of_a_pool_that_the_launcher_started_are_patched(mpirun, places):
    """From a plain folder, without the .pth: it goes before mpirun, for what is spawned gets mpirun's environment."""
    launcher = [places.bare_python, "-m", "trtllm_pp_progress", "run", "--"]
    line = [places.bare_python, SCRIPTS / "pool.py"]
    assert outcome(mpirun(1, *line, path=[places.folder], before=launcher)) == [(True, True)] * 2


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


def test_the_doctor_as_a_rank_sees_what_the_rank_would_use(mpirun, tmp_path):
    """Its child is no rank of the job, which it would hang, but gets the layer that mpirun was told to use."""
    code = (
        "import json, os, sys\nfrom trtllm_pp_progress.tools.doctor import collect\n"
        "name = os.environ['OMPI_COMM_WORLD_RANK'] + '.json'\n"
        "open(os.path.join(os.environ['REPORTS'], name), 'x').write(json.dumps(collect(60)))"
    )
    (tmp_path / "rank.py").write_text(code)
    found = mpirun(2, "--mca", "pml", "ob1", sys.executable, tmp_path / "rank.py", path=[ROOT])
    assert [report["transport"]["layer"] for report in found] == ["pml ob1"] * 2
    assert [report["mpi"]["state"] for report in found] == ["ok"] * 2
