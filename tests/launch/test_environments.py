"""Environments that real MPIs meet: labels, a small /dev/shm, an address on two hosts, masks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import standin
from beds import CANNOT, on_hosts
from jobs import ROOT, alone
from places import make_venv

PROBE = ["-m", "trtllm_pp_progress", "probe", "--sizes", "256,1000000", "--no-edge"]
BENCH = ["-m", "trtllm_pp_progress", "bench", "--pp", "2", "--policies", "flush", "--steps", "10", "--repeat", "1"]
MPICH = ROOT / ".venv" / "mpich" / "bin"


def one_error(output):
    """Return the only complaint of ours in an output."""
    assert "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("Error: ")]
    return line


def wanting(folder, *command):
    """Run a command where /dev/shm has the size of the folder's name, in a mount namespace of its own."""
    shell = f"mount -t tmpfs -o size={folder} tmpfs /dev/shm && exec {sys.executable} {' '.join(map(str, command))}"
    line = ["unshare", "--mount", "--user", "--map-root-user", "sh", "-c", shell]
    if subprocess.run([*line[:4], "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody make a namespace")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    return subprocess.run(line, timeout=110, cwd=ROOT, check=False, **options)


@pytest.mark.parametrize("command", [PROBE, BENCH], ids=["probe", "bench"])
@pytest.mark.parametrize(("asked", "fabric"), [("tcp", "posix,self"), ("shm", "tcp,self")])
def test_case_68_79_a_run_is_not_called_after_a_transport_that_did_not_carry_it(job, command, asked, fabric):
    """pmodels/mpich#7680, ofiwg/libfabric#11974: an MPI may choose in other ways than by what was asked for."""
    done = job(2, 100, *command, "--transport", asked, FABRIC=fabric)
    if command is PROBE:
        assert f"CANNOT TELL: {asked} was asked for" in done.output, done.output
    else:
        assert f"{asked} was asked for, but the bytes went by" in one_error(done.output)
    assert done.rc == 2


@pytest.mark.parametrize(("fabric", "carrier"), [("tcp,self", "tcp"), ("posix,self", "memory")])
def test_case_68_the_default_is_called_after_what_carried_it(job, tmp_path, fabric, carrier):
    """Control: nothing was asked for, and the kernel knows; in the file, too."""
    path = tmp_path / "probe.json"
    done = job(2, 100, *PROBE, "--json", path, FABRIC=fabric)
    assert done.rc in (0, 1), done.output
    assert f"carried by {carrier}" in done.output
    (link,) = json.loads(path.read_text())["runs"][0]["links"]
    assert link["carrier"] == carrier
    assert "edge_bytes" not in link
    assert "eager up to" not in done.output


@pytest.mark.skipif(not MPICH.exists(), reason="bash ci/setup.sh mpich makes the other MPI")
@pytest.mark.parametrize("netmod", ["ofi", "ucx"])
@pytest.mark.parametrize(("transport", "carrier"), [("tcp", "tcp"), ("shm", "memory")])
def test_case_68_mpich_over_libfabric_ends_in_time_and_is_labelled(netmod, transport, carrier):
    """pmodels/mpich#7680: whatever its verdict, within the step limit; the provider is TCP's."""
    line = [MPICH / "python", *PROBE, "--transport", transport, "--step-timeout", "20"]
    env = {"MPIR_CVAR_CH4_NETMOD": netmod, "FI_PROVIDER": "tcp"}
    done = alone(100, "-c", f"import os; os.execv({str(line[0])!r}, {list(map(str, line))!r})", **env)
    assert done.returncode in (0, 1, 2), done.stdout
    assert done.returncode == 2 or f"carried by {carrier}" in done.stdout, done.stdout


@pytest.mark.skipif(not MPICH.exists(), reason="bash ci/setup.sh mpich makes the other MPI")
@pytest.mark.parametrize("command", [PROBE, BENCH], ids=["probe", "bench"])
@pytest.mark.parametrize("launcher", ["mpich", "openmpi"])
def test_case_63_real_launchers_of_each_others_mpi(command, launcher):
    """One line that names both; what MPI and its launcher print beside it is theirs."""
    other = {"mpich": "openmpi", "openmpi": "mpich"}[launcher]
    start = {"mpich": ["mpiexec"], "openmpi": ["mpirun", "--oversubscribe"]}[launcher]
    folder = ROOT / ".venv"
    line = [folder / launcher / "bin" / start[0], *start[1:], "-n", 2, folder / other / "bin" / "python", *command]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code = f"import os; os.execv({str(line[0])!r}, {list(map(str, line))!r})"
    done = alone(100, "-c", code, **root)
    said = one_error(done.stdout)
    assert "Open MPI" in said
    assert "MPICH" in said
    assert done.returncode == 2, done.stdout


# What Intel MPI 2021.18 shows: its names, the line of I_MPI_DEBUG, and a launcher that heeds I_MPI_FABRICS and
# FI_PROVIDER alone. Under it is the MPI of these tests, so that bytes move, and there are functions to find.
INTEL = """
import os, wrapt

@wrapt.when_imported("mpi4py.MPI")
def disguise(mpi):
    mpi.get_vendor = lambda: ("Intel MPI", (2021, 18, 1))
    mpi.Get_library_version = lambda: "Intel(R) MPI Library 2021.18 for Linux* OS"
    if "I_MPI_DEBUG" in os.environ:
        print("[0] MPI startup(): libfabric provider:", os.environ["FI_PROVIDER"])
"""
INTELS_LAUNCHER = """#!/bin/sh
if [ "$1" = --version ]; then
    echo "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260626 (id: b44796a)"
    exit
fi
case $I_MPI_FABRICS in shm) UCX_TLS=posix,self ;; *) UCX_TLS=$FI_PROVIDER,self ;; esac
export UCX_TLS OMPI_MCA_pml=ucx OMPI_MCA_opal_common_ucx_tls=any OMPI_MCA_opal_common_ucx_devices=any
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
exec {launcher} "$@"
"""
DRIVER = """
from mpi4py import MPI
from trtllm_pp_progress.driver.native import NativeDriver
driver = NativeDriver()
print(driver.runs, driver.state)
driver.stop()
"""


@pytest.fixture
def intel(tmp_path):
    """Return the function that runs Python where MPI and its launcher are to all appearance Intel's, over tcp."""
    make_venv(tmp_path / "venv")
    mpirun = tmp_path / "venv" / "bin" / "mpirun"
    mpirun.write_text(INTELS_LAUNCHER.format(launcher=Path(sys.executable).parent / "mpirun"))
    mpirun.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(INTEL)
    env = standin.environment(tmp_path, ROOT, I_MPI_FABRICS="ofi", FI_PROVIDER="tcp")
    options = {"env": env, "capture_output": True, "text": True, "timeout": 100, "check": False, "cwd": "/"}
    return lambda *line: subprocess.run([mpirun.with_name("python"), *line], **options)


def test_case_79_intel_mpi_is_named_with_its_fabric_and_driven(intel):
    """mpi4py/mpi4py#744: layer and provider, labels that are true, and a native driver that finds MPI's functions."""
    done = intel("-m", "trtllm_pp_progress", "doctor", "--json")
    report = json.loads(done.stdout)
    transport = report["transport"]
    assert (report["mpi"]["vendor"], transport["layer"], transport["provider"]) == ("Intel MPI", "fabrics ofi", "tcp")
    assert (transport["source"], transport["measured"]["carrier"]) == ("measured", "tcp")
    assert transport["between_nodes"] == "libfabric tcp"
    probed = intel(*PROBE, "--transport", "tcp,shm")
    assert "carried by tcp" in probed.stdout, probed.stdout + probed.stderr
    assert "carried by memory" in probed.stdout, probed.stdout + probed.stderr
    driven = intel("-c", DRIVER)
    assert "True idle" in driven.stdout, driven.stdout + driven.stderr


@pytest.mark.parametrize("size", ["4m", "20m"])
def test_case_76_a_small_shared_memory_ends_in_time_with_its_size_said(size):
    """ROCm/rocm-systems#3700: UCX does without it, MPI falls back to TCP, or a rank ends in a named step."""
    done = wanting(size, *PROBE[:-1], "--transport", "default,shm", "--step-timeout", 20)
    assert done.returncode in (0, 1, 2), done.stdout
    assert f"/dev/shm of {size[:-1]} MiB" in done.stdout.replace("\n", " "), done.stdout
    assert done.returncode != 2 or re.search(r"rank \d: it .* in '.*'", done.stdout), done.stdout


SAME = """
PATH=$PATH:/usr/sbin:/sbin
add='ip link add docker0 type veth peer name docker1 && ip addr add 172.17.0.1/16 dev docker0 &&
     ip link set docker0 up && ip link set docker1 up'
sh -c "$add" && $HOSTS_ENTER -x 10.77.0.2 "PATH=\\$PATH:/usr/sbin:/sbin; $add" || exit 77
exec "$@"
"""


@pytest.mark.parametrize("devices", ["docker0", "eth0"])
def test_case_80_two_hosts_with_one_address_are_hinted_at(devices):
    """openucx/ucx#9383: each takes the other's docker0 for its own; by the interface that they share it works."""
    probe = [sys.executable, *PROBE, "--transport", "tcp", "--step-timeout", 10]
    done = on_hosts(2, "bash", "-c", SAME, "sh", *probe, options=["--slots", 1], limit=90, UCX_NET_DEVICES=devices)
    if done.returncode == CANNOT:
        pytest.skip(done.stdout.strip())
    if devices == "eth0":
        assert done.returncode in (0, 1), done.stdout
        assert "host1 to host2, carried by tcp" in done.stdout
    else:
        assert done.returncode == 2, done.stdout
        assert "UCX_NET_DEVICES=docker0" in done.stdout, "a hint that does not advise what was just done"


def test_case_87_settings_that_the_launcher_does_not_read_are_named(tmp_path):
    """kubeflow/mpi-operator#842: set as upstream's page on affinity has it, Open MPI 5 binds ranks all the same."""
    name, code = "OMPI_MCA_hwloc_base_binding_policy", "import os; print('cores', len(os.sched_getaffinity(0)))"
    env = standin.environment(ROOT, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **{name: "none"})
    launcher = Path(sys.executable).parent / "mpirun"
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI) 5" not in version:
        pytest.skip("only Open MPI 5 has that launcher")
    line = [launcher, "-n", "1", sys.executable, "-c", code]
    bound = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "cores 1" in bound, "it has come to be read: the finding is to go"
    doctor = [sys.executable, "-m", "trtllm_pp_progress", "doctor", "--json", "--no-measure"]
    done = subprocess.run(doctor, env=env, capture_output=True, text=True, timeout=100, check=False)
    (means,) = [one["means"] for one in json.loads(done.stdout)["findings"] if one["id"] == "old-settings"]
    assert name in means


AFFINITY = """
import os, sys, threading
from pathlib import Path
from mpi4py import MPI
from trtllm_pp_progress.driver.native import NativeDriver
before = set(threading.enumerate())
tids = {int(task.name) for task in Path("/proc/self/task").iterdir()}
if sys.argv[1] == "first":
    os.sched_setaffinity(0, {0})
driver = NativeDriver()
if sys.argv[1] == "later":
    os.sched_setaffinity(0, {0})
new = {int(task.name) for task in Path("/proc/self/task").iterdir()} - tids
for tid in sorted(new):
    print("native", sorted(os.sched_getaffinity(tid)))
print("main", sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(__import__("os").sched_getaffinity(0)) < 2, reason="a mask of one core cannot be narrowed")
@pytest.mark.parametrize(("when", "follows"), [("first", True), ("later", False)])
def test_case_82_the_native_thread_has_the_mask_of_the_one_that_starts_it(when, follows, tmp_path):
    """NVIDIA/TensorRT-LLM#18117: a mask that is set later is the calling thread's alone, as docs/doctor.md says."""
    script = tmp_path / "affinity.py"
    script.write_text(AFFINITY)
    done = alone(60, script, when)
    assert done.returncode == 0, done.stdout
    masks = dict(re.findall(r"^(\w+) \[(.*)\]$", done.stdout, re.M))
    assert masks["main"] == "0"
    assert (masks["native"] == "0") == follows
    assert "the thread that started it" in (ROOT / "docs" / "doctor.md").read_text()
