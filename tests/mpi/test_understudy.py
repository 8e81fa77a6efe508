"""The second drivers inside a real MPI, whose handles are pointers or integers, alone and between two ranks."""

import ctypes
import mmap
import subprocess
import time
from pathlib import Path

import pytest
from mpi4py import MPI
from mpi4py.util import pkl5

from trtllm_pp_progress import _understudy
from trtllm_pp_progress._parked import Parked
from trtllm_pp_progress._understudy import Understudy

ROOT = Path(__file__).parents[2]
LIMIT_MS = 20_000  # only a fault makes a wait reach it
HOLD_MS = 500
COMPILE = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-o"]

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """Build the native part for this rank and load it from there; return the helper that holds the GIL in C."""
    folder = tmp_path_factory.mktemp(f"native{MPI.COMM_WORLD.rank}")
    source = ROOT / "trtllm_pp_progress/native/understudy.c"
    subprocess.run([*COMPILE, folder / "understudy.abi3.so", source], check=True, timeout=60)
    subprocess.run([*COMPILE, folder / "counter.so", ROOT / "tests/native/counter.c"], check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_understudy, "NATIVE", folder)
        yield ctypes.PyDLL(str(folder / "counter.so"))


@pytest.fixture
def comm():
    """Return a communicator of this test alone."""
    private = MPI.COMM_WORLD.Dup()
    yield private
    private.Free()


def test_the_handle_and_the_function_are_those_of_mpi4py(native):
    """The size of the handle tells its kind, and its value is the C handle itself."""
    probe = _understudy.mpi_probe()
    assert probe.comm_is_pointer == MPI.Get_library_version().startswith("Open MPI")
    assert probe.any_source == MPI.ANY_SOURCE
    linked = ctypes.CDLL(MPI.__file__)
    assert probe.function == ctypes.cast(linked.MPI_Iprobe, ctypes.c_void_p).value
    handle = ctypes.c_void_p(probe.comm) if probe.comm_is_pointer else ctypes.c_int(probe.comm)
    size = ctypes.c_int(-1)
    assert linked.MPI_Comm_size(handle, ctypes.byref(size)) == 0
    assert size.value == MPI.COMM_WORLD.size


@pytest.mark.parametrize("kind", [Understudy, Parked])
def test_many_executors_one_after_the_other_leak_no_communicator(native, kind):
    """MPI has few context ids (MPICH: about 2,000); who takes one gives it back."""
    for _ in range(2500):
        assert kind(1e-4, 1e-4).stop(LIMIT_MS / 1e3)


@pytest.mark.parametrize("kind", [Understudy, Parked])
def test_messages_of_other_threads_stay_whole(native, comm, kind):
    """A busy exchange while the second driver is armed, disarmed and ticks at its fastest: every message is right."""
    driver, turns = kind(0.0, 1e-6), 30 if kind is Parked else 300  # parked costs up to 100 ms a turn on two cores
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    world = pkl5.Intracomm(comm)
    for turn in range(turns):
        driver.driven()
        request = world.isend((turn, bytes(turn * 1000)), dest=right, tag=7)
        assert world.recv(source=left, tag=7) == (turn, bytes(turn * 1000))
        request.wait()
        if turn % 3 == 0:
            driver.idle()
    assert driver.stop(LIMIT_MS / 1e3)
    assert driver.ticks > 0


def receive_under_held_gil(native, comm, folder, driver):
    """Rank 0 sends 1 MB and holds the GIL until rank 1, 20 ms late, has it: return whether that came true on rank 0."""
    world = pkl5.Intracomm(comm)
    path = folder / "received"
    if comm.rank == 0:
        path.write_bytes(bytes(mmap.PAGESIZE))
    comm.Barrier()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
        word = ctypes.c_int.from_buffer(page)
        done = None
        comm.Barrier()
        if comm.rank == 0:
            request = world.isend(bytes(1_000_000), dest=1, tag=7)
            if driver:
                driver.driven()
            done = bool(native.hold_until(ctypes.byref(word), HOLD_MS))
            request.wait()
        elif comm.rank == 1:
            time.sleep(0.02)  # the scenario's late receiver
            assert len(world.recv(source=0, tag=7)) == 1_000_000
            word.value = 1
        comm.Barrier()
        del word
    return done


@pytest.fixture
def shared_folder(comm, tmp_path):
    """Return a folder that every rank of this host sees."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [Understudy, Parked])
def test_a_late_receiver_is_served_while_the_gil_is_held(native, comm, shared_folder, kind):
    """NVIDIA/TensorRT-LLM#16170: the receive completes although its sender runs no Python meanwhile."""
    driver = kind(2e-3 if kind is Understudy else LIMIT_MS / 1e3)  # parked: how long it may take to get into place
    done = receive_under_held_gil(native, comm, shared_folder, driver)
    assert driver.stop(LIMIT_MS / 1e3)
    assert done is (True if comm.rank == 0 else None)


@pytest.mark.mpi(min_size=2)
def test_without_a_second_driver_it_is_served_only_once_the_gil_is_free(native, comm, shared_folder):
    """Control: the payload stays parked for as long as the GIL is held, over a transport that parks at all.

    Open MPI: UCX_TLS=tcp,self. MPICH: with MPIR_CVAR_NOLOCAL=1 besides, or its own shared memory carries the message.
    """
    done = receive_under_held_gil(native, comm, shared_folder, None)
    assert done is (False if comm.rank == 0 else None)
