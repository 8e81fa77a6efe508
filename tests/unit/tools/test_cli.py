"""The command line: bad input is one line on stderr and exit code 2; the launcher's command is a pure function."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_pp_progress
from trtllm_pp_progress import cli
from trtllm_pp_progress.tools.bench.scenarios import POLICY_NAMES, SCENARIOS
from trtllm_pp_progress.tools.job import launch as _launch
from trtllm_pp_progress.tools.job.role import CLAIMS

PYTHON = sys.executable
ROOT = Path(trtllm_pp_progress.__file__).parents[1]
RANK_VARIABLES = [variable for _, variable, _ in CLAIMS]
OPEN_MPI = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260626 (id: b44796a)\n"
MPICH = "HYDRA build details:\n    Version:                                 4.3.2\n"


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch):
    """Let no test take itself for a rank."""
    for variable in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(variable)


@pytest.fixture
def no_launcher(tmp_path, monkeypatch):
    """Have no mpirun on the PATH and none beside this Python."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(_launch.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Put an mpirun beside this Python that notes how it was called, and exits with the code in the file `code`."""
    script = tmp_path / "mpirun"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\nfrom pathlib import Path\n"
        "here = Path(__file__).parent\n"
        f"if sys.argv[1:] == ['--version']:\n    print({OPEN_MPI!r})\n    sys.exit()\n"
        "(here / 'call.json').write_text(json.dumps([sys.argv, dict(os.environ)]))\n"
        "sys.exit(int((here / 'code').read_text()))\n"
    )
    script.chmod(0o755)
    (tmp_path / "code").write_text("0")
    monkeypatch.setattr(_launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    return tmp_path


def refused(capfd, *arguments):
    """Run the command line in this process and return its one line of complaint."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    out, err = capfd.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("Error: ")
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--policies", "fast"],
            "unknown policy 'fast': valid ones are regressed, flush, oneshot, inline, iprobe, patched, eager, async",
        ),
        (["--policies", "flush,fast"], "unknown policy 'fast'"),
        (["--policies", ""], "unknown policy ''"),
        (
            ["--scenarios", "slow"],
            "unknown scenario 'slow': valid ones are published, steady, late, late_random, large, large_8mb, "
            "large_32mb, many, uneven, gil_held, gil_held_all, gil_held_500, busy, sync_dependency",
        ),
        (["--transport", "ib"], "unknown transport 'ib': valid ones are tcp, shm, default"),
        (["--transport", "tcp,shm"], "--transport takes one transport"),
        (["--pp", "1"], "--pp"),
        (["--pp", "x"], "--pp"),
        (["--repeat", "0"], "--repeat"),
        (["--steps", "9"], "--steps"),
        (["--payload", "-1"], "--payload"),
        (["--timeout", "0"], "--timeout"),
        (["--json", "/"], "--json"),
        (["--polices", "flush"], "--polices"),
        (["extra"], "extra"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_line_and_exit_code_2(arguments, said, capfd):
    """The line names the value and, where there are few, the valid ones; nothing is started."""
    assert said in refused(capfd, "bench", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--transport", "ib"], "unknown transport 'ib': valid ones are tcp, shm, default"),
        (["--sizes", "4096,x"], "'x' is not a valid integer range"),
        (["--sizes", "0"], "0 is not in the range 1<=x<=1073741824"),
        (["--sizes", ""], "'' is not a valid integer range"),
        (["--ranks", "1"], "--ranks"),
        (["--step-timeout", "nan"], "--step-timeout"),
        (["--timeout", "inf"], "--timeout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_of_probe_is_one_line_and_exit_code_2(arguments, said, capfd, no_launcher):
    """The probe's exit code 2 is also that of bad input: neither tells anything about the fabric."""
    assert said in refused(capfd, "probe", *arguments)


@pytest.mark.parametrize("option", ["--compute-ms", "--reentry-ms"])
@pytest.mark.parametrize("bad", ["nan", "inf", "-1", "x"])
def test_a_time_that_is_no_finite_number_in_range_is_refused(option, bad, capfd, no_launcher):
    """Options are as strict as settings: nan is no time."""
    assert option in refused(capfd, "bench", option, bad)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_timeout_that_never_comes_is_refused(bad, capfd, no_launcher):
    """Everything has a deadline."""
    assert "--timeout" in refused(capfd, "bench", "--timeout", bad)


@pytest.mark.parametrize("bad", ["0", "-1", "x", "nan", "1.5"])
def test_a_bad_budget_in_the_environment_is_one_line_and_exit_code_2(bad, capfd, monkeypatch, no_launcher):
    """It is said once, by name, before any rank is started."""
    monkeypatch.setenv("TRTLLM_PP_PROGRESS_MAX_POLLS", bad)
    assert f"TRTLLM_PP_PROGRESS_MAX_POLLS={bad!r} is not valid: a whole number from 1" in refused(capfd, "bench")


@pytest.mark.parametrize("command", [["bench"], ["bench", "--policies", "eager"], ["probe"]], ids=" ".join)
@pytest.mark.parametrize("variable", [None, *RANK_VARIABLES])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    command, variable, capfd, tmp_path, monkeypatch, no_launcher
):
    """By the process that would write it, whoever started it; no folder is made."""
    if variable and "eager" not in command:
        monkeypatch.setenv(variable, "0")
    path = tmp_path / "none" / "out.json"
    assert f"{path} cannot be written: No such file" in refused(capfd, *command, "--json", str(path))
    assert not path.parent.exists()


@pytest.mark.parametrize("before", [None, "", "earlier"])
def test_a_result_of_before_stays_until_there_is_a_new_one(before, capfd, tmp_path, no_launcher):
    """A file is tried, not emptied; one that was not there is not left behind."""
    path = tmp_path / "out.json"
    if before is not None:
        path.write_text(before)
    assert "mpirun was not found" in refused(capfd, "bench", "--json", str(path))
    assert (path.read_text() if path.exists() else None) == before


def test_a_launcher_that_is_not_found_is_one_line_and_exit_code_2(capfd, no_launcher):
    """With an empty PATH and no launcher beside Python the line says what to install."""
    assert "mpirun was not found: install Open MPI or MPICH" in refused(capfd, "bench")


@pytest.mark.parametrize("text", ["not a program", ""], ids=["no interpreter", "empty"])
def test_a_launcher_that_cannot_be_run_is_one_line_and_exit_code_2(text, capfd, started):
    """A broken mpirun is a clear error, too."""
    (started / "mpirun").write_text(text and f"#!/nowhere/{text}\n")
    assert "mpirun" in refused(capfd, "bench")


@pytest.mark.parametrize("arguments", [["bench", "--policies", "fast"], ["bench", "--nothing"], ["nothing"]])
def test_the_module_run_as_a_program_complains_the_same_way(arguments):
    """`python -m trtllm_pp_progress` is the same program: exit code 2, one line, no traceback."""
    command = [sys.executable, "-m", "trtllm_pp_progress", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["bench", "--help"], ["--version"]])
def test_help_and_version_need_no_mpi(arguments, capfd, no_launcher):
    """They print and exit with 0."""
    cli.main(arguments)
    out, err = capfd.readouterr()
    assert out
    assert err == ""


def test_without_a_command_the_help_is_printed(capfd):
    """No command is bad input, answered by the help."""
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 2
    assert "bench" in "".join(capfd.readouterr())


def test_the_relays_have_one_list_which_needs_no_mpi():
    """What the command line offers is what the host has, and the patch; no MPI is imported for the names."""
    script = (
        "import json, sys\nfrom trtllm_pp_progress.tools.host import POLICIES, HostExecutor\n"
        "assert all(issubclass(relay, HostExecutor) for relay in POLICIES.values())\n"
        "assert 'mpi4py' not in sys.modules\nprint(json.dumps(list(POLICIES)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert [*json.loads(done.stdout), "patched"] == list(POLICY_NAMES)


def test_the_help_of_the_bench_explains_every_scenario(capfd):
    """One line each, in order."""
    cli.main(["bench", "--help"])
    out, _err = capfd.readouterr()
    listed = [line.split()[0] for line in out[out.index("Scenarios:") :].splitlines()[1:] if line.strip()]
    assert listed == list(SCENARIOS)


# Starting the ranks


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("transport", _launch.TRANSPORTS)
def test_open_mpi_is_told_to_use_ucx_on_the_transport(transport, root, monkeypatch):
    """TCP and shared memory are forced past Open MPI's checks; the default forces nothing; root is allowed."""
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    line, variables = _launch.command(4, transport, ["-m", "x"], "/bin/mpirun", OPEN_MPI)
    assert line[:6] == ["/bin/mpirun", "-n", "4", "--oversubscribe", "--bind-to", "none"]
    assert line[-3:] == [sys.executable, "-m", "x"]
    options = line[6:-3]
    if transport == "default":
        assert options == []
        assert "UCX_TLS" not in variables
    else:
        assert options[:3] == ["--mca", "pml", "ucx"]
        assert options[-2:] == ["-x", "UCX_TLS"]
        assert variables["UCX_TLS"] == {"tcp": "tcp,self", "shm": "posix,sysv,cma,self"}[transport]
    allowed = {name for name in variables if name.startswith("OMPI_ALLOW_RUN_AS_ROOT")}
    assert allowed == ({"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} if root else set())


@pytest.mark.parametrize(
    "version", ["mpirun (Open MPI) 4.1.6", "mpirun (OpenRTE) 4.1.6", "prterun (PRRTE) 3.0", OPEN_MPI]
)
def test_each_name_of_open_mpis_launcher_is_known(version):
    """Its launcher goes by several names."""
    assert "--oversubscribe" in _launch.command(2, "tcp", [], "mpirun", version)[0]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("tcp", {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp"}),
        ("shm", {"UCX_TLS": "posix,sysv,cma,self"}),
        ("default", {}),
    ],
)
def test_mpich_takes_variables_only(transport, expected):
    """No option of Open MPI's reaches it, and TCP is forced within a node, too."""
    line, variables = _launch.command(3, transport, ["-m", "x"], "mpiexec", MPICH)
    assert line == ["mpiexec", "-n", "3", sys.executable, "-m", "x"]
    assert variables == expected


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("tcp", {"UCX_TLS": "tcp,self", "I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp", "I_MPI_PIN": "0"}),
        ("shm", {"UCX_TLS": "posix,sysv,cma,self", "I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}),
        ("default", {"I_MPI_PIN": "0"}),
    ],
)
def test_intel_mpi_is_told_its_fabric_and_not_to_bind(transport, expected):
    """It goes by libfabric, and binds each rank, with all its threads, to a core unless told otherwise."""
    assert _launch.command(2, transport, [], "mpirun", INTEL)[1] == expected


@pytest.mark.parametrize(("version", "vendor"), [(OPEN_MPI, "Open MPI"), (INTEL, "Intel MPI"), (MPICH, "MPICH")])
def test_a_launcher_is_known_by_what_it_says(version, vendor):
    """By its answer to --version."""
    assert _launch.made_by(version) == vendor


def test_a_launcher_that_is_a_script_finds_what_is_beside_it(started, monkeypatch):
    """Intel's mpirun calls mpiexec.hydra, which need not be on the PATH."""
    monkeypatch.setenv("PATH", "/usr/bin")
    assert _launch.launch(2, "default", [], 10) == 0
    _line, environment = json.loads((started / "call.json").read_text())
    assert environment["PATH"].split(os.pathsep) == [str(started), "/usr/bin"]


def test_settings_of_a_run_reach_ranks_on_other_hosts():
    """Open MPI is told to pass them on; without a forced transport, too."""
    line, variables = _launch.command(2, "default", [], "mpirun", OPEN_MPI, {"UCX_RNDV_THRESH": "inf"})
    assert variables["UCX_RNDV_THRESH"] == "inf"
    assert " ".join(line[3:-1]) == "--oversubscribe --bind-to none -x UCX_RNDV_THRESH"


def test_a_setting_is_a_run_of_its_own_and_every_repetition_has_one(started, capfd):
    """The relays share an mpirun, the setting has the regressed relay in another one; and all again."""
    calls = started / "calls"
    row = {"scenario": "steady", "payload_bytes": 1}
    rank = {"parked_ms": [1.0], "polls": 0, "steps": 1, "cpu_cores": 0.1, "reentry_ms": 1.0, "wrong": 0, "small_ms": []}
    (started / "mpirun").write_text(
        f"#!{PYTHON}\nimport json, os, sys\n"
        f"if sys.argv[1:] == ['--version']:\n    print({OPEN_MPI!r})\n    sys.exit()\n"
        "options = dict(zip(sys.argv[:-1], sys.argv[1:]))\n"
        "policies, eager = options['--policies'].split(','), os.environ.get('UCX_RNDV_THRESH')\n"
        f"open({str(calls)!r}, 'a').write(f'{{policies}} {{eager}} {{options[\"--repeat\"]}}\\n')\n"
        f"raw = [{{'tokens_per_s': 9.0 if eager else 3.0, 'ranks': [{rank!r}]}}]\n"
        f"rows = [{row!r} | {{'policy': policy, 'raw': raw}} for policy in policies]\n"
        "json.dump({'environment': {}, 'floor': [], 'rows': rows}, open(options['--json'], 'w'))\n"
    )
    out = started / "out.json"
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "--policies", "regressed,eager,flush", "--repeat", "2", "--json", str(out)])
    assert left.value.code == 0, capfd.readouterr()
    both = ["['regressed', 'flush'] None 1", "['regressed'] inf 1"]
    assert calls.read_text().splitlines() == 2 * both
    rows = json.loads(out.read_text())["rows"]
    assert [(row["policy"], row["tokens_per_s"], len(row["raw"])) for row in rows] == [
        ("regressed", 3.0, 2),
        ("eager", 9.0, 2),
        ("flush", 3.0, 2),
    ]


def test_mpichs_progress_thread_is_refused_under_open_mpi(started, capfd):
    """A setting that changes nothing there is none."""
    assert "policy 'async' is MPICH's" in refused(capfd, "bench", "--policies", "async")


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_a_setting_is_refused_as_a_rank(variable, capfd, monkeypatch):
    """Who starts mpirun himself sets the variable himself."""
    monkeypatch.setenv(variable, "0")
    assert "policy 'eager' is a setting of the whole run" in refused(capfd, "bench", "--policies", "eager")


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_ranks_get_the_same_arguments_and_their_exit_code_is_ours(code, started, monkeypatch):
    """The launcher runs this program again with what was asked for, and what it says is what we say."""
    (started / "code").write_text(str(code))
    monkeypatch.setattr(sys, "argv", ["prog", "bench", "--pp", "3", "--transport", "shm", "--policies", "patched"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == code
    line, environment = json.loads((started / "call.json").read_text())
    assert line[1:4] == ["-n", "3", "--oversubscribe"]
    wanted = ["-m", "trtllm_pp_progress", "bench", "--pp", "3", "--transport", "shm", "--policies", "patched"]
    assert line[-len(wanted) :] == wanted
    assert environment["UCX_TLS"] == "posix,sysv,cma,self"


def test_ranks_that_do_not_end_are_ended(started, monkeypatch):
    """At the timeout the launcher is told to stop, waited for, and the error says so."""
    (started / "mpirun").write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 60\n')
    processes = []

    class Noted(subprocess.Popen):
        """A process that is noted."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(_launch.subprocess, "Popen", Noted)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(_launch.LaunchError, match=r"no result after 0\.01 s: the ranks were ended"):
        _launch.launch(2, "tcp", [], 0.01)
    assert [process.returncode for process in processes] == [0, -signal.SIGTERM]


def test_run_warns_of_a_policy_for_vllm_that_nothing_would_load(monkeypatch, capfd):
    """One line to stderr for each error, and the command runs; nothing where no variable of it is set."""
    from trtllm_pp_progress.installation import run

    monkeypatch.setattr(run, "execute", lambda command: print("runs", *command))
    monkeypatch.setenv("TRTLLM_PP_PROGRESS_VLLM_RECIEVE", "on")
    cli.main(["run", "--", "true"])
    out, err = capfd.readouterr()
    assert out == "runs true\n"
    assert "did you mean TRTLLM_PP_PROGRESS_VLLM_RECEIVE?" in err
    assert err.count("\n") == 1
    monkeypatch.delenv("TRTLLM_PP_PROGRESS_VLLM_RECIEVE")
    cli.main(["run", "--", "true"])
    assert capfd.readouterr().err == ""
