"""probe and bench under launchers that are not what they seem: one line, exit code 2, and no job of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import standin

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
DOCTOR = {"doctor": ["doctor", "--json", "--timeout", "60"]}
COMMANDS = {"probe": ["probe"], "bench": ["bench", "--pp", "2", "--steps", "10", "--repeat", "1"]}
MPI = """
import sys
COMM_WORLD = type("Comm", (), {{"Get_size": lambda self: {size}, "Get_rank": lambda self: 0}})()
import mpi4py
def get_vendor(): return ({vendor!r}, ({version}, 0, 2))
def Get_library_version(): return {text!r}
def Is_initialized(): return mpi4py.rc.initialize
def Is_finalized(): return True
if mpi4py.rc.initialize and {aborts}:
    sys.stderr.write("Runtime environment uses unsupported PMI version PMIx. Aborting.")
    import os; os._exit(16)
"""
MPIRUN = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "{rank}"}
HYDRA = {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "HYDI_CONTROL_FD": "7"}
INTEL = {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "I_MPI_HYDRA_UUID": "1"}


@pytest.fixture
def mpi(tmp_path):
    """Return the function that writes an mpi4py for a library, which is alone in every process or aborts."""

    def write(vendor, version=5, text="", size=1, aborts=False):
        folder = tmp_path / "mpi"
        (folder / "mpi4py").mkdir(parents=True)
        rc = "rc = type('rc', (), {'initialize': True})()\n__version__ = '4.1.3'\n"
        (folder / "mpi4py" / "__init__.py").write_text(rc)
        body = MPI.format(vendor=vendor, version=version, text=text, size=size, aborts=aborts)
        (folder / "mpi4py" / "MPI.py").write_text(body)
        return folder

    return write


@pytest.fixture
def no_launch(tmp_path):
    """Return a folder whose mpirun leaves a mark, and the mark: nobody should start it."""
    (tmp_path / "bin").mkdir()
    mark = tmp_path / "started"
    for name in ("mpirun", "mpiexec"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ntouch {mark}\necho 'mpirun (Open MPI) 5.0.11'\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "bin", mark


def processes(command, *path, ranks=2, options=(), **variables):
    """Run a command as that many processes at once, as a launcher does; return exit codes, and all that they said."""
    started = []
    for rank in range(ranks):
        own = {name: value.format(rank=rank) for name, value in variables.items()}
        line = [sys.executable, "-m", "trtllm_pp_progress", *(COMMANDS | DOCTOR)[command], *map(str, options)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": "/"}
        started.append(subprocess.Popen(line, env=standin.environment(*path, ROOT, **own), **streams))
    said = [process.communicate(timeout=90)[0] for process in started]
    return [process.returncode for process in started], "".join(said)


def complaints(output):
    """Return the lines that are complaints of ours."""
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if line.startswith("Error: ")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "variables",
    [{"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMIX_RANK": "0"}],
    ids=["PMI", "PMIx, which says of no number"],
)
def test_case_62_in_the_job_of_a_shell_the_variables_to_unset_are_named(command, variables, no_launch):
    """TACC/remora#47: no job is started within the one that this seems to be."""
    folder, mark = no_launch
    path = f"{folder}:{os.environ['PATH']}"
    codes, output = processes(command, ranks=1, PATH=path, **variables)
    (line,) = complaints(output)
    assert codes == [2]
    assert f"env {' '.join(f'-u {name}' for name in variables)} COMMAND" in line
    assert not mark.exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("library", "launcher", "names"),
    [
        (("Open MPI",), HYDRA, ("MPICH's mpiexec", "Open MPI 5.0.2")),
        (("MPICH", 5, "MPICH configure: --with-pm=hydra", 1, True), MPIRUN, ("Open MPI's mpirun", "MPICH 5.0.2")),
    ],
    ids=["Open MPI under mpiexec", "MPICH under mpirun"],
)
def test_case_63_the_launcher_of_another_mpi_is_one_line_with_both_names(command, library, launcher, names, mpi):
    """mpi4py/mpi4py#155, open-mpi/ompi#10799: each process would be rank 0 of 1, or MPI would end it."""
    codes, output = processes(command, mpi(*library), **launcher)
    (line,) = complaints(output)
    assert codes == [2, 2]
    assert all(name in line for name in names)
    assert "mpirun -n" not in line


@pytest.mark.parametrize("command", COMMANDS)
def test_case_64_tasks_of_plain_srun_start_nothing_and_write_nothing(command, no_launch, tmp_path):
    """open-mpi/ompi#13523: four at once, with Slurm's variables alone and one result file for all."""
    folder, mark = no_launch
    result = tmp_path / "same.json"
    slurm = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "4", "PATH": f"{folder}:{os.environ['PATH']}"}
    codes, output = processes(command, ranks=4, options=["--json", result], **slurm)
    assert codes == [2] * 4
    assert len(complaints(output)) == 4
    assert output.count("srun --mpi=pmix") == 4
    assert not result.exists()
    assert not mark.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_case_64_without_slurms_variables_the_launcher_is_started(command, no_launch, tmp_path):
    """Control: the mark would have been seen."""
    folder, mark = no_launch
    python = tmp_path / "venv" / "python"  # beside which there is no launcher
    python.parent.mkdir()
    code = f"import sys; sys.executable = {str(python)!r}; import trtllm_pp_progress.cli as cli; cli.main()"
    line = [sys.executable, "-c", code, *COMMANDS[command]]
    env = standin.environment(ROOT, PATH=f"{folder}:{os.environ['PATH']}")
    subprocess.run(line, env=env, capture_output=True, timeout=60, check=False)
    assert mark.exists()


@pytest.mark.parametrize(
    ("variables", "finding", "ranks"),
    [
        (HYDRA, "launcher-mismatch", 2),
        ({"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "4"}, "slurm-singletons", 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "launcher-alone", 1),
        ({"PMIX_RANK": "0"}, "launcher-mismatch", 1),
    ],
    ids=["mpiexec over Open MPI", "plain srun", "a shell's job", "a variable that was left"],
)
def test_case_62_63_64_the_doctor_has_it_as_a_finding(variables, finding, ranks):
    """One report, of rank 0, which is neither fine nor cured; nobody waits for ranks that cannot come together."""
    codes, output = processes("doctor", ranks=ranks, **variables)
    report = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert finding in [one["id"] for one in report["findings"]]
    assert report["verdict"] in ("affected", "unknown")
    assert set(codes) == {{"affected": 1, "unknown": 2}[report["verdict"]]}
    assert report["transport"]["measured"] is None


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("value", ["0", "false", "no"])
def test_case_78_an_mpi_that_is_not_to_be_started_is_one_line(command, value, no_launch):
    """mpi4py/mpi4py#713: nothing is started for nothing."""
    _folder, mark = no_launch
    codes, output = processes(command, ranks=1, MPI4PY_RC_INITIALIZE=value)
    (line,) = complaints(output)
    assert codes == [2]
    assert "MPI4PY_RC_INITIALIZE" in line
    assert not mark.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_case_92_a_library_that_could_have_joined_and_has_not_is_named(command, mpi):
    """pmodels/mpich#7383: an MPICH for PMIx takes itself for alone under its own mpiexec."""
    codes, output = processes(command, mpi("MPICH", 4, "MPICH configure: --with-pmix=/usr"), **HYDRA)
    (line,) = complaints(output)
    assert codes == [2, 2]
    assert "MPICH's mpiexec started 2 ranks, but MPICH 4.0.2" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_case_96_intels_launcher_over_another_mpi_is_named(command, mpi):
    """aws/aws-parallelcluster#3980: a program of one, a module of the other."""
    codes, output = processes(command, mpi("Open MPI"), **INTEL)
    (line,) = complaints(output)
    assert codes == [2, 2]
    assert "Intel MPI's mpiexec started 2 ranks, but Open MPI 5.0.2" in line


def test_a_refused_probe_leaves_an_earlier_result_alone(tmp_path):
    """The file is not even opened."""
    result = tmp_path / "probe.json"
    result.write_text(json.dumps({"earlier": True}))
    slurm = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2"}
    processes("probe", options=["--json", result], **slurm)
    assert json.loads(result.read_text()) == {"earlier": True}
