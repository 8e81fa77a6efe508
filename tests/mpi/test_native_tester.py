"""Tests from C of real requests: they complete what mpi4py's own tests do, and raise what mpi4py raises."""

import ctypes
import gc

import numpy as np
import pytest
from exchange import TAG, Exchange
from mpi4py import MPI
from mpi4py.util import pkl5
from native_parts import LIMIT_S

from trtllm_pp_progress.driver.library import MOST_REQUESTS
from trtllm_pp_progress.driver.tester import AS_LONG_AS_IT_TAKES, NativeTester

pytestmark = pytest.mark.mpi(min_size=2)

KIB = 1024


@pytest.fixture
def tester():
    """Return a tester of this MPI's requests."""
    return NativeTester()


@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("size", [256, 64 * KIB, KIB * KIB])
@pytest.mark.parametrize("way", ["pickle", "array"])
def test_a_send_is_complete_once_it_was_received(comm, way, size, yields):
    """Eager and rendezvous, of one message or of several; mpi4py agrees, and it may be asked again."""
    native, world = NativeTester(yields).new(), pkl5.Intracomm(comm)
    exchange = Exchange(comm, way)
    if comm.rank == 0:
        data = exchange.data(size, size)
        request = world.isend(data.tobytes() if way == "pickle" else data, 1, TAG)
        assert native(request, AS_LONG_AS_IT_TAKES, LIMIT_S) is True
        assert native.used >= 1
        assert [part.Test() for part in request] == [True] * len(request)
        assert native(request, 1, LIMIT_S) is True
        request.wait()
    elif comm.rank == 1:
        exchange.assert_received(size, size)


def test_a_send_that_nobody_receives_is_not_complete(comm, line, tester):
    """Nor does a test of it last longer than it may; its buffer is whole when somebody comes after all."""
    native, world = tester.new(), pkl5.Intracomm(comm)
    if comm.rank == 0:
        request = world.isend(Exchange.data(1, KIB * KIB).tobytes(), 1, TAG)
        assert native(request, 100, LIMIT_S) is False
        assert native.used == 100
        assert native(request, AS_LONG_AS_IT_TAKES, 0.01) is False
        stop = ctypes.c_int64(1)
        assert native(request, AS_LONG_AS_IT_TAKES, LIMIT_S, ctypes.addressof(stop)) is False
        assert native.used == 1
        gc.collect()
        line.tell(1)
        assert native(request, AS_LONG_AS_IT_TAKES, LIMIT_S) is True
    elif comm.rank == 1:
        line.hear(0)
        assert world.recv(source=0, tag=TAG) == Exchange.data(1, KIB * KIB).tobytes()
    line.meet()


def error_of(ask):
    """Return the class of error that `ask` raises for a receive whose buffer is too small."""
    request = MPI.COMM_SELF.Irecv(np.empty(8, np.uint8), 0, TAG)
    MPI.COMM_SELF.Send(np.zeros(64, np.uint8), 0, TAG)
    with pytest.raises(MPI.Exception) as raised:
        ask(request)
    return raised.value.Get_error_class()


def test_an_error_of_mpi_is_mpi4pys_exception(tester):
    """The very class of error that mpi4py's own test raises."""
    native = tester.new()

    def ask(request):
        while not native((request,), 1000, LIMIT_S):
            pass

    def mpi4py_asks(request):
        while not request.Test():
            pass

    assert error_of(ask) == error_of(mpi4py_asks) == MPI.ERR_TRUNCATE


def test_what_it_takes(comm, tester):
    """Sends of up to MOST_REQUESTS messages; an object of more is tested by Python, and completes as well."""
    exchange = Exchange(comm, mode="native")
    many = [
        exchange.data(seed, 256 * KIB) for seed in range(MOST_REQUESTS - 1)
    ]  # one message each, and two before them
    if comm.rank == 0:
        few = exchange.comm.isend(many[:-1], 1, TAG)
        assert (len(few), tester.takes(few)) == (MOST_REQUESTS, True)
        assert tester.new()(few, AS_LONG_AS_IT_TAKES, LIMIT_S) is True
        exchange.table[0] = request = exchange.comm.isend(many, 1, TAG)
        assert (len(request), tester.takes(request)) == (MOST_REQUESTS + 1, False)
        assert not tester.takes(request[0])
        exchange.wait(0)
        assert exchange.table[0] is None
        assert exchange.counters["completions"] == 1
        assert exchange.engine.retire()
    elif comm.rank == 1:
        for count in (MOST_REQUESTS - 2, MOST_REQUESTS - 1):
            received = exchange.comm.recv(source=0, tag=TAG)
            assert [bytes(part) for part in received] == [part.tobytes() for part in many[:count]]
    comm.Barrier()
