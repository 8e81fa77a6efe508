"""The doctor as a program: on this machine's MPI, on broken ones, and with a stand-in for upstream."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standin
from standin import TESTS, run

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "doctor.md").read_text()
# UCX over TCP, which Open MPI takes on InfiniBand only unless told otherwise.
TCP = {
    "UCX_TLS": "tcp,self",
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
}
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


def doctor(env, code, *options, python=sys.executable):
    """Run the doctor; return its report."""
    return json.loads(run([python, "-m", "trtllm_pp_progress", "doctor", "--json", *options], env, code).stdout)


def broken(folder, body):
    """Write an mpi4py whose MPI module does what `body` does on import."""
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text("__version__ = '4.1.0'\n")
    (folder / "mpi4py" / "MPI.py").write_text(body)
    return folder


def keys(value, prefix=""):
    """List the keys of a report: sections by their members, findings by name."""
    for name, below in value.items():
        if isinstance(below, dict) and name in ("package", "tensorrt_llm", "mpi", "transport", "cores"):
            yield from keys(below, f"{name}.")
        else:
            yield prefix + name


def documented():
    """List the keys that the document has, in its table."""
    table = DOCUMENT.split("## Keys of the report")[1].split("## Findings")[0]
    return {key for line in re.findall(r"^\| (`.*?) \|", table, re.M) for key in re.findall(r"`([\w.]+)`", line)}


def test_on_ucx_over_tcp_it_says_affected_and_names_the_transport():
    """With this machine's own MPI; every key is documented, and every documented key is there."""
    report = doctor(standin.environment(ROOT, **TCP), 1)
    assert report["verdict"] == "affected"
    assert "UCX over tcp" in report["reason"]
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
    assert "ucx-unused" in [finding["id"] for finding in report["findings"]]


def test_shared_memory_alone_parks_nothing():
    """Control: the verdict is of the transport, not of the machine."""
    report = doctor(standin.environment(ROOT, **TCP | {"UCX_TLS": "posix,sysv,self"}), 0)
    assert (report["verdict"], report["transport"]["within_node"]) == ("fine", "posix")


def test_a_thread_level_below_multiple_is_reported():
    """As MPI has been initialised, not as it was asked to be."""
    report = doctor(standin.environment(ROOT, MPI4PY_RC_THREAD_LEVEL="funneled", **TCP), 1)
    assert report["mpi"]["thread_level"] != "MULTIPLE"
    assert "thread-level" in [finding["id"] for finding in report["findings"]]


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_mpi_neither_hangs_nor_ends_the_doctor(how, tmp_path):
    """It cannot tell, within its timeout, and says what MPI did; the rest of the report is there."""
    body, state, said = BROKEN[how]
    started = time.monotonic()
    env = standin.environment(broken(tmp_path, body), ROOT, TRTLLM_PP_PROGRESS="1")
    report = doctor(env, 2, "--timeout", "5")
    assert time.monotonic() - started < 60
    assert (report["verdict"], report["mpi"]["state"]) == ("unknown", state)
    assert said in report["mpi"]["error"]
    assert said in report["reason"]
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
    assert before["tensorrt_llm"]["patches"] == after["tensorrt_llm"]["patches"]
    assert "PyExecutor.wait_on_pp_send_handles" in after["tensorrt_llm"]["patches"]
    assert before["package"]["gate"] is True


@pytest.mark.parametrize(
    ("source", "state", "said"),
    [
        ("class PyExecutor:\n    pass\n", "ok", "has no _broadcast_sample_state_loop"),
        ("raise ImportError('libcuda.so.1: cannot open')", "failed", "libcuda.so.1"),
        ("import os\nos.abort()", "crashed", "SIGABRT"),
        ("import time\ntime.sleep(600)", "timed out", "no answer within"),
    ],
    ids=["unknown shape", "failed", "crashed", "timed out"],
)
def test_an_upstream_that_cannot_be_judged_is_unknown(source, state, said, upstream):
    """The transport is known all the same."""
    report = doctor(standin.environment(upstream(source), ROOT, **TCP), 2, "--timeout", "5")
    assert (report["verdict"], report["tensorrt_llm"]["state"]) == ("unknown", state)
    assert said in report["reason"]
    assert "UCX over tcp" in report["reason"]


def test_a_bad_setting_is_not_taken_for_a_fault_of_upstream(upstream):
    """The class is judged all the same, and the variable is named."""
    env = standin.environment(upstream(), TESTS, ROOT, TRTLLM_PP_PROGRESS_MODE="fast", **TCP)
    report = doctor(env, 1)
    assert (report["tensorrt_llm"]["state"], report["tensorrt_llm"]["era"]) == ("ok", "E2")
    assert [one["means"] for one in report["findings"] if one["id"] == "setting"] == [
        "TRTLLM_PP_PROGRESS_MODE='fast' is not valid: one of auto, poll, native, thread"
    ]


def test_upstream_is_not_imported_as_a_rank(upstream):
    """It initialises MPI on import, which would wait for the other ranks of the job."""
    source = "import os\nassert 'PMIX_RANK' not in os.environ\nclass PyExecutor:\n    pass\n"
    report = doctor(standin.environment(upstream(source), ROOT, PMIX_RANK="0", **TCP), 2)
    assert report["tensorrt_llm"]["state"] == "ok"


def test_the_screen_says_the_same():
    """Verdict, transport and what to do; the exit code is that of --json."""
    done = run(
        [sys.executable, "-m", "trtllm_pp_progress", "doctor"], standin.environment(ROOT, COLUMNS="120", **TCP), 1
    )
    assert done.stdout.startswith("affected: UCX over tcp")
    assert "TRTLLM_PP_PROGRESS=1" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("bad", ["0", "nan", "inf", "x"])
def test_a_bad_timeout_is_one_line_and_exit_code_2(bad):
    """Everything has a deadline."""
    line = [sys.executable, "-m", "trtllm_pp_progress", "doctor", "--timeout", bad]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--timeout" in done.stderr
