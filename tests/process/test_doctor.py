"""The doctor as a program: on this machine's MPI, on broken ones, and with a stand-in for upstream."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standin
from standin import TESTS, run

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
DOCUMENT = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
# UCX over TCP, which Open MPI takes on InfiniBand only unless told otherwise.
TCP = {
    "UCX_TLS": "tcp,self",
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
}
SHARED = {**TCP, "UCX_TLS": "posix,sysv,self"}  # nothing is parked there
FORBIDS_CMA = Path(__file__).parent / "forbids_cma.py"
SECTIONS = ("package", "tensorrt_llm", "launcher", "mpi", "transport", "cores", "surroundings")
BROKEN = {
    "hangs": ("import time\nwhile True: time.sleep(60)", "timed out", "no answer within"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed", "ended by SIGSEGV"),
    "cannot load": ("raise RuntimeError('no MPI\\nlibmpi.so.12: not found')", "failed", "libmpi.so.12"),
    "is half there": ("raise ImportError('undefined symbol: MPI_Session_init')", "failed", "undefined symbol"),
    "exits": ("import os\nos._exit(3)", "failed", "exit code 3"),
}  # fmt: skip


@pytest.fixture
def upstream(tmp_path):
    """Return the function that writes a stand-in and returns its folder."""
    return lambda *source: standin.write(tmp_path / "upstream", *source)


def doctor(env, code, *options, python=sys.executable, before=(), measure=False):
    """Run the doctor, which measures only where it is told to; return its report."""
    options = [*options, *([] if measure else ["--no-measure"])]
    line = [*before, python, "-m", "trtllm_pp_progress", "doctor", "--json", *options]
    return json.loads(run(line, env, code).stdout)


def ids(report):
    """Return the ids of a report's findings."""
    return [finding["id"] for finding in report["findings"]]


def said(report, finding):
    """Return what the finding of that id means."""
    (means,) = [one["means"] for one in report["findings"] if one["id"] == finding]
    return means


def broken(folder, body):
    """Write an mpi4py whose MPI module does what `body` does on import."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text("__version__ = '4.1.0'\n")
    (folder / "mpi4py" / "MPI.py").write_text(body)
    return folder


def keys(value, prefix=""):
    """List the keys of a report: sections by their members, findings by name."""
    for name, below in value.items():
        if isinstance(below, dict) and name in SECTIONS:
            yield from keys(below, f"{name}.")
        else:
            yield prefix + name


def documented():
    """List the keys that the document has, in its table."""
    table = DOCUMENT.split("## Keys of the report")[1].split("## Environments")[0]
    return {key for line in re.findall(r"^\| (`.*?) \|", table, re.M) for key in re.findall(r"`([\w.]+)`", line)}


def test_on_ucx_over_tcp_it_says_affected_and_names_the_transport():
    """With this machine's own MPI; every key is documented, and every documented key is there."""
    report = doctor(standin.environment(ROOT, **TCP), 1)
    assert report["verdict"] == "affected"
    assert "UCX over tcp" in report["reason"]
    assert (report["transport"]["source"], report["transport"]["measured"]) == ("table", None)
    assert set(keys(report)) == documented()
    transport, mpi = report["transport"], report["mpi"]
    assert (transport["layer"].split()[1], transport["parks"], transport["between_nodes"]) == ("ucx", "yes", "tcp")
    assert transport["ucx"]["tls"] == "tcp,self"
    assert transport["ucx"]["thread_safe"] is True
    assert set(transport["found"]) == {"self", "tcp"}
    assert (mpi["state"], mpi["thread_level"]) == ("ok", "MULTIPLE")
    assert os.path.exists(mpi["libmpi"])
    assert report["tensorrt_llm"]["state"] == "absent"


def test_the_layer_in_use_is_told_from_the_one_that_is_there():
    """UCX is loaded, but ob1 sends: UCX_TLS changes nothing, and that is said."""
    report = doctor(standin.environment(ROOT, UCX_TLS="tcp,self", OMPI_MCA_pml="ob1"), 1)
    assert report["transport"]["layer"] == "pml ob1"
    assert "ucx-unused" in ids(report)


def test_shared_memory_alone_parks_nothing():
    """Control: the verdict is of the transport, not of the machine."""
    report = doctor(standin.environment(ROOT, **SHARED), 0)
    assert (report["verdict"], report["transport"]["within_node"]) == ("fine", "posix")


def test_a_thread_level_below_multiple_is_reported():
    """As MPI has been initialised, not as it was asked to be."""
    report = doctor(standin.environment(ROOT, MPI4PY_RC_THREAD_LEVEL="funneled", **TCP), 1)
    assert report["mpi"]["thread_level"] != "MULTIPLE"
    assert "thread-level" in ids(report)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_mpi_neither_hangs_nor_ends_the_doctor(how, tmp_path):
    """It cannot tell, within its timeout, and says what MPI did; the rest of the report is there."""
    body, state, words = BROKEN[how]
    started = time.monotonic()
    env = standin.environment(broken(tmp_path, body), ROOT, TRTLLM_PP_PROGRESS="1")
    report = doctor(env, 2, "--timeout", "5")
    assert time.monotonic() - started < 60
    assert (report["verdict"], report["mpi"]["state"]) == ("unknown", state)
    assert words in report["mpi"]["error"]
    assert words in report["reason"]
    assert report["mpi"]["mpi4py"] == "4.1.0"
    assert report["package"]["switch"] is True
    assert set(keys(report)) == documented()


def test_an_import_of_the_hanging_mpi_does_hang(tmp_path):
    """Control: what the doctor's child imports does not come back by itself."""
    env = standin.environment(broken(tmp_path, BROKEN["hangs"][0]))
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], env=env, timeout=5, check=False)


def test_what_a_hanging_mpi_has_started_is_ended_too(tmp_path):
    """Its whole process group: a daemon of its would hold the terminal."""
    body = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    doctor(standin.environment(broken(tmp_path, body), ROOT), 2, "--timeout", "3")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while running(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"


def running(pid):
    """Tell whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_without_mpi4py_it_answers(tmp_path):
    """As on a host that only serves."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('No module named mpi4py')")
    report = doctor(standin.environment(tmp_path, ROOT), 2)
    assert (report["verdict"], report["mpi"]["state"]) == ("unknown", "absent")
    assert set(keys(report)) == documented()


def test_a_worker_that_would_be_patched_is_told_from_one_that_is(upstream, places):
    """The same host, the variable unset and set: affected, then cured, by a child that starts as a worker does."""
    env = standin.environment(upstream(), TESTS, **TCP)
    before = doctor(env, 1, python=places.python)
    after = doctor({**env, "TRTLLM_PP_PROGRESS": "1"}, 0, python=places.python)
    assert (before["verdict"], after["verdict"]) == ("affected", "cured")
    assert (before["tensorrt_llm"]["patched"], after["tensorrt_llm"]["patched"]) == (False, True)
    assert before["tensorrt_llm"]["era"] == after["tensorrt_llm"]["era"] == "E2"
    assert after["tensorrt_llm"]["relay_waits"] is after["tensorrt_llm"]["pumped"] is False
    assert before["tensorrt_llm"]["patches"] == after["tensorrt_llm"]["patches"]
    assert "PyExecutor.wait_on_pp_send_handles" in after["tensorrt_llm"]["patches"]
    assert before["package"]["gate"] is True


@pytest.mark.parametrize(
    ("source", "state", "words"),
    [
        ("class PyExecutor:\n    pass\n", "ok", "has no _broadcast_sample_state_loop"),
        ("raise ImportError('libcuda.so.1: cannot open')", "failed", "libcuda.so.1"),
        ("import os\nos.abort()", "crashed", "SIGABRT"),
        ("import time\ntime.sleep(600)", "timed out", "no answer within"),
    ],
    ids=["unknown shape", "failed", "crashed", "timed out"],
)
def test_an_upstream_that_cannot_be_judged_is_unknown(source, state, words, upstream):
    """The transport is known all the same."""
    report = doctor(standin.environment(upstream(source), ROOT, **TCP), 2, "--timeout", "5")
    assert (report["verdict"], report["tensorrt_llm"]["state"]) == ("unknown", state)
    assert words in report["reason"]
    assert "UCX over tcp" in report["reason"]


def test_a_bad_setting_is_not_taken_for_a_fault_of_upstream(upstream):
    """The class is judged all the same, and the variable is named."""
    env = standin.environment(upstream(), TESTS, ROOT, TRTLLM_PP_PROGRESS_MODE="fast", **TCP)
    report = doctor(env, 1)
    assert (report["tensorrt_llm"]["state"], report["tensorrt_llm"]["era"]) == ("ok", "E2")
    assert [one["means"] for one in report["findings"] if one["id"] == "setting"] == [
        "TRTLLM_PP_PROGRESS_MODE='fast' is not valid: one of auto, poll, native"
    ]


def test_upstream_is_not_imported_as_a_rank(upstream):
    """It initialises MPI on import, which would wait for the other ranks of the job."""
    source = "import os\nassert 'PMIX_RANK' not in os.environ\nclass PyExecutor:\n    pass\n"
    report = doctor(standin.environment(upstream(source), ROOT, PMIX_RANK="0", **TCP), 2)
    assert report["tensorrt_llm"]["state"] == "ok"


def test_the_screen_says_the_same():
    """Verdict, transport and what to do; the exit code is that of --json."""
    done = run(
        [sys.executable, "-m", "trtllm_pp_progress", "doctor", "--no-measure"],
        standin.environment(ROOT, COLUMNS="120", **TCP),
        1,
    )
    assert done.stdout.startswith("affected: UCX over tcp")
    assert "TRTLLM_PP_PROGRESS=1" in done.stdout
    assert done.stderr == ""


# Environments, by their case


def test_it_measures_with_two_ranks_of_its_own(tmp_path):
    """What they found goes before the table, and what carried their bytes is read from the kernel."""
    report = doctor(standin.environment(ROOT, **TCP), 1, measure=True)
    transport = report["transport"]
    assert (transport["source"], transport["not_measured"]) == ("measured", None)
    assert transport["measured"]["verdict"] == "park"
    assert transport["measured"]["carrier"] == "tcp"
    assert "measured" in ids(report)
    assert "within a host they park, measured" in report["reason"]


@pytest.mark.parametrize("scheme", ["put_zcopy", "get_zcopy", "am"])
def test_case_66_doctor_and_probe_agree_on_a_rendezvous_scheme(scheme, tmp_path):
    """NVIDIA/TensorRT-LLM#6085: it is advised for servers that hang, and decides who copies. The header prints it."""
    variables = {**TCP, "UCX_TLS": "posix,cma,self", "UCX_RNDV_SCHEME": scheme}
    env = standin.environment(ROOT, **variables)
    line = ["-m", "trtllm_pp_progress", "probe", "--transport", "default", "--sizes", "65536,1000000", "--no-edge"]
    done = subprocess.run([sys.executable, *line], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert f"UCX_RNDV_SCHEME {scheme}" in done.stdout.replace("\n", " ")
    report = doctor(env, done.returncode, measure=True)
    assert report["transport"]["measured"]["verdict"] == ("park" if done.returncode else "move")
    assert f"UCX_RNDV_SCHEME is {scheme}" in said(report, "rndv-scheme")
    assert report["transport"]["ucx"]["rndv_scheme"] == scheme


def test_case_67_tcp_that_a_site_forces_is_named_with_what_there_is_without_it():
    """NVIDIA/TensorRT-LLM#18373: UCX itself is asked, with its setting and without."""
    report = doctor(standin.environment(ROOT, **TCP), 1)
    assert "UCX_TLS=tcp,self keeps UCX to TCP" in said(report, "tcp-forced")
    assert {"posix", "sysv"} <= set(report["transport"]["ucx"]["found_without_tls"])
    assert "tcp-forced" not in ids(doctor(standin.environment(ROOT, **{**TCP, "UCX_TLS": "all"}), 1))


def test_case_73_a_setting_of_pmix_that_was_handed_on_is_named():
    """NVIDIA/pyxis#139: the child keeps what configures PMIx, and fails as a worker would."""
    report = doctor(standin.environment(ROOT, PMIX_MCA_psec="munge"), 2)
    assert report["verdict"] == "unknown"
    assert "PMIX_MCA_psec=munge" in said(report, "pmix-settings")
    assert report["mpi"]["vendor"], "it is told which MPI does not start"


@pytest.mark.parametrize("name", ["OPAL_PREFIX", "PMIX_PREFIX", "I_MPI_ROOT"])
def test_case_74_a_folder_that_is_not_there_is_named(name, upstream, places):
    """NVIDIA/TensorRT-LLM#1294: also where this MPI starts all the same; a worker's might not."""
    env = standin.environment(upstream(), TESTS, TRTLLM_PP_PROGRESS="1", **TCP | {name: "/nonexistent"})
    report = doctor(env, 2, python=places.python)
    assert report["verdict"] == "unknown"
    assert f"{name}=/nonexistent is not here" in said(report, "lost-path")


def test_case_75_an_endpoint_that_cannot_be_made_is_a_finding(tmp_path):
    """mlcommons/mlperf-automations#664: what UCX said on its way out is repeated."""
    body = (
        "import sys\nprint('[1.2] [h:1:0]  ucp_ep.c:9  UCX  ERROR failed to create UCP endpoint: no route', "
        "file=sys.stderr)\nsys.exit(1)"
    )
    report = doctor(standin.environment(broken(tmp_path, body), ROOT), 2)
    assert "failed to create UCP endpoint: no route" in said(report, "ucx-endpoint")
    assert "locked memory" in next(one["do"] for one in report["findings"] if one["id"] == "ucx-endpoint")


def test_case_75_a_low_limit_on_locked_memory_is_a_finding(upstream, places):
    """NVIDIA/TensorRT-LLM#3112: with the actual limit; a worker that would be cured is in doubt."""
    env = standin.environment(upstream(), TESTS, TRTLLM_PP_PROGRESS="1", **TCP)
    report = doctor(env, 2, python=places.python, before=["prlimit", "--memlock=65536"])
    assert "64 KiB may be locked" in said(report, "memlock")
    assert report["surroundings"]["memlock_bytes"] == 65536
    assert (report["verdict"], report["tensorrt_llm"]["patched"]) == ("unknown", True)


@pytest.mark.parametrize("preloaded", [True, False])
def test_case_77_of_two_copies_of_ucx_the_one_that_mpi_uses_is_reported(preloaded, tmp_path):
    """ai-dynamo/nixl#1668: a wheel hashes the name of its copy; preloaded it comes first for all, else for itself."""
    own = doctor(standin.environment(ROOT, **TCP), 1)["transport"]["ucx"]["library"]
    other = tmp_path / "nixl.libs" / "libucp-2be8eb38.so.0.0.0"
    other.parent.mkdir()
    # Under another name for the loader, too, or it would take the two for one.
    other.write_bytes(Path(own).read_bytes().replace(b"libucp.so.0\0", b"libucX.so.0\0"))
    (tmp_path / "sitecustomize.py").write_text(f"import ctypes\nctypes.CDLL({str(other)!r})\n")
    env = standin.environment(*([] if preloaded else [tmp_path]), ROOT, **TCP)
    env["LD_LIBRARY_PATH"] = os.pathsep.join([os.path.dirname(own), env["LD_LIBRARY_PATH"]])
    report = doctor(env | ({"LD_PRELOAD": str(other)} if preloaded else {}), 1)
    used, unused = (str(other), own) if preloaded else (own, str(other))
    ucx = report["transport"]["ucx"]
    assert (ucx["library"], ucx["others_loaded"]) == (used, [unused])
    assert unused in said(report, "ucx-copies")


def test_case_77_a_library_is_known_by_each_of_its_names(tmp_path):
    """Cray's libmpi names the compiler."""
    own = doctor(standin.environment(ROOT, **TCP), 1)["transport"]["ucx"]["library"]
    names = ["libmpi_gnu_123.so.12", "libmpi_abi.so.1", "libmpich.so.12", "libmpi-0a1b2c3d.so.40", "libmpifort.so.12"]
    for name in names:
        shutil.copy(own, tmp_path / name)
    code = (
        f"import ctypes\nfor name in {names!r}: ctypes.CDLL({str(tmp_path)!r} + '/' + name)\n"
        "from trtllm_pp_progress.tools.job.library import loaded\nprint(*loaded('libmpi'), sep='\\n')"
    )
    done = run([sys.executable, "-c", code], standin.environment(ROOT, LD_LIBRARY_PATH=os.path.dirname(own)))
    assert done.stdout.split() == sorted(str(tmp_path / name) for name in names[:4])


def test_case_78_an_mpi_that_is_not_to_be_started_is_said_so():
    """mpi4py/mpi4py#713: vendor and version are reported all the same."""
    report = doctor(standin.environment(ROOT, MPI4PY_RC_INITIALIZE="0", **TCP), 2)
    assert (report["verdict"], report["mpi"]["state"], report["mpi"]["thread_level"]) == ("unknown", "off", None)
    assert report["mpi"]["vendor"]
    assert report["mpi"]["version"]
    assert "mpi-off" in ids(report)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_case_83_a_path_that_the_output_cannot_show_is_escaped(encoding, tmp_path):
    """pranav8494/orchestra-py#31: 1 means affected, so that no fault of the output may exit with it."""
    folder = tmp_path / "clés"
    folder.mkdir()
    env = standin.environment(folder, ROOT, PYTHONIOENCODING=encoding, OPAL_PREFIX="/clés", **SHARED)
    done = run([sys.executable, "-m", "trtllm_pp_progress", "doctor", "--no-measure"], env, 2)
    assert ("cl\\xe9s" if encoding == "ascii" else "clés") in done.stdout


@pytest.mark.parametrize("where", [">&-", ">/dev/full", "| true", "2>&- >&-"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_case_83_an_output_that_nobody_takes_changes_no_exit_code(where, form):
    """Closed, full, or a reader that has gone: the verdict is fine, so is the exit code."""
    command = f"{sys.executable} -m trtllm_pp_progress doctor --no-measure {form}"
    code = "exit ${PIPESTATUS[0]}" if "|" in where else "exit $?"
    run(["bash", "-c", f"{command} {where}; {code}"], standin.environment(ROOT, **SHARED), 0)


def test_case_83_a_fault_of_the_doctor_itself_is_no_verdict():
    """A traceback would exit with 1."""
    code = (
        "import trtllm_pp_progress.tools.doctor.start as doctor, trtllm_pp_progress.cli as cli\n"
        "def collect(*_, **__): raise KeyError('a fault')\ndoctor.collect = collect\ncli.main(['doctor'])"
    )
    assert "KeyError: 'a fault'" in run([sys.executable, "-c", code], standin.environment(ROOT), 2).stderr


def test_case_88_cray_mpich_without_its_gpu_library_is_named(tmp_path):
    """gyselax/gyselalibxx#479: it ends the process while it starts."""
    body = "import os\nos.write(2, b'MPIDI_CRAY_init: GTL library is not linked\\n')\nos._exit(255)"
    report = doctor(standin.environment(broken(tmp_path, body), ROOT, MPICH_GPU_SUPPORT_ENABLED="1"), 2)
    assert "GTL library is not linked" in said(report, "cray-gtl")
    assert report["environment"]["MPICH_GPU_SUPPORT_ENABLED"] == "1"


def test_case_89_memory_that_may_not_be_read_is_tried():
    """openucx/ucx#3046: what a container forbids is met by a filter of system calls here."""
    report = doctor(standin.environment(ROOT, **TCP), 1, before=[sys.executable, FORBIDS_CMA])
    assert report["surroundings"]["single_copy"] == "EPERM"
    assert "(EPERM)" in said(report, "cma-denied")
    assert doctor(standin.environment(ROOT, **TCP), 1)["surroundings"]["single_copy"] == "works"


def test_case_90_a_device_that_is_not_here_is_repeated_as_ucx_says_it():
    """ai-dynamo/dynamo#1209: UCX goes on without it, by TCP."""
    report = doctor(standin.environment(ROOT, **TCP | {"UCX_TLS": "all", "UCX_NET_DEVICES": "mlx5_bond_0:1"}), 1)
    assert "'mlx5_bond_0:1' is not available" in said(report, "ucx-not-available")


def test_case_91_a_provider_that_is_not_in_use_is_named():
    """open-mpi/ompi#9858: FI_PROVIDER=efa, and messages go by something else."""
    report = doctor(standin.environment(ROOT, FI_PROVIDER="efa", **TCP), 1)
    assert "FI_PROVIDER=efa is not in use: messages go by pml ucx" in said(report, "provider-other")


def test_case_94_inside_an_allocation_the_doctor_measures_on_this_host(tmp_path):
    """ai-dynamo/dynamo#808: a launcher would take the allocation's hosts, and Slurm's daemons, for its own."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NODELIST": "node[1-2]"}
    slurm |= {"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    report = doctor(standin.environment(ROOT, **TCP, **slurm), 1, measure=True)
    assert report["transport"]["measured"]["carrier"] == "tcp"


def test_case_95_a_launcher_that_cannot_be_reached_from_a_container_is_named(upstream, places):
    """NERSC/podman-hpc#158: the variables are there, the folder of its socket is not."""
    rank = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "n", "PMIX_SERVER_TMPDIR": "/nonexistent/pmix"}
    env = standin.environment(upstream(), TESTS, TRTLLM_PP_PROGRESS="1", **TCP, **rank)
    report = doctor(env, 2, python=places.python)
    assert "PMIX_SERVER_TMPDIR=/nonexistent/pmix is not here" in said(report, "pmix-unreachable")


@pytest.mark.parametrize("bad", ["0", "nan", "inf", "x"])
def test_a_bad_timeout_is_one_line_and_exit_code_2(bad):
    """Everything has a deadline."""
    line = [sys.executable, "-m", "trtllm_pp_progress", "doctor", "--timeout", bad]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--timeout" in done.stderr
