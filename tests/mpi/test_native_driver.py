"""The native driver inside a real MPI, whose handles are pointers or integers, alone and between two ranks."""

import ctypes

import pytest
from held_gil import received_while_held
from mpi4py import MPI
from mpi4py.util import pkl5
from native_parts import LIMIT_S, address_of

from trtllm_pp_progress.driver.library import mpi_calls
from trtllm_pp_progress.driver.native import NativeDriver

pytestmark = pytest.mark.mpi


def test_the_handle_and_the_functions_are_those_of_mpi4py(native):
    """The size of the handle tells its kind, and its value is the C handle itself."""
    calls = mpi_calls()
    assert calls.comm_is_pointer == MPI.Get_library_version().startswith("Open MPI")
    assert calls.any_source == MPI.ANY_SOURCE
    linked = ctypes.CDLL(MPI.__file__)
    assert (calls.iprobe, calls.test) == (address_of(linked.MPI_Iprobe), address_of(linked.MPI_Test))
    handle = ctypes.c_void_p(calls.comm) if calls.comm_is_pointer else ctypes.c_int(calls.comm)
    size = ctypes.c_int(-1)
    assert linked.MPI_Comm_size(handle, ctypes.byref(size)) == 0
    assert size.value == MPI.COMM_WORLD.size


def test_many_executors_one_after_the_other_leak_no_communicator(native):
    """MPI has few context ids (MPICH: about 2,000); who takes one gives it back."""
    for _ in range(2500):
        assert NativeDriver(1e-4, 1e-4).stop(LIMIT_S)


@pytest.mark.parametrize("lingers", [True, False])
def test_messages_of_other_threads_stay_whole(native, comm, lingers):
    """A busy exchange while the driver is armed, disarmed and ticks at its fastest: every message is right."""
    driver = NativeDriver(0.0, 1e-6, lingers=lingers)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    world = pkl5.Intracomm(comm)
    for turn in range(300):
        driver.driven()
        request = world.isend((turn, bytes(turn * 1000)), dest=right, tag=7)
        assert world.recv(source=left, tag=7) == (turn, bytes(turn * 1000))
        request.wait()
        if turn % 3 == 0:
            driver.idle()
    assert driver.ticks > 0
    assert driver.stop(LIMIT_S)


def driven_by(comm, driver):
    """Return what posts a send on rank 0, which nobody but `driver` drives, and receives it on rank 1."""
    world = pkl5.Intracomm(comm)

    def post(data):
        if data is None:
            return world.recv(source=0, tag=7)
        request = world.isend(data, dest=1, tag=7)
        if driver:
            driver.driven()
        return request.wait

    return post


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lingers", [True, False])
def test_a_late_receiver_is_served_while_the_gil_is_held(native, comm, line, shared, lingers):
    """NVIDIA/TensorRT-LLM#16170: the receive completes although its sender runs no Python meanwhile."""
    driver = NativeDriver(2e-3, lingers=lingers)
    done = received_while_held(native, comm, line, shared, driven_by(comm, driver))
    assert driver.stop(LIMIT_S)
    assert done is (True if comm.rank == 0 else None)


@pytest.mark.mpi(min_size=2)
def test_without_a_native_driver_it_is_served_only_once_the_gil_is_free(native, comm, line, shared):
    """Control: the payload stays parked for as long as the GIL is held, over a transport that parks at all.

    Open MPI: UCX_TLS=tcp,self. MPICH: with MPIR_CVAR_NOLOCAL=1 besides, or its own shared memory carries the message.
    """
    done = received_while_held(native, comm, line, shared, driven_by(comm, None), expected=False)
    assert done is (False if comm.rank == 0 else None)
