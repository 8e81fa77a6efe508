"""The engine with real requests: eager and rendezvous, pickled, buffers and out-of-band; slots, threads, deadlines."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest
from exchange import TAG, Exchange
from outside import LIMIT_S
from rings import until

pytestmark = pytest.mark.mpi(min_size=2)

KIB = 1024
EAGER = 256  # over TCP, UCX 1.20 was measured to use its rendezvous from somewhere between 512 and 900 bytes
SIZES = [EAGER, KIB, 64 * KIB, KIB * KIB]
OUT_OF_BAND = [256 * KIB, 256 * KIB + 8, KIB * KIB]  # pkl5 sends these buffers beside the pickle

WAYS = [
    *(("pickle", size) for size in SIZES),
    *(("array", size) for size in OUT_OF_BAND),
    *((way, size) for way in ("buffer", "list") for size in SIZES),
]


@pytest.mark.parametrize("mode", ["poll", "native"])
@pytest.mark.parametrize(("way", "size"), WAYS)
def test_a_send_is_seen_complete_and_its_slot_cleared(comm, way, size, mode):
    """All ways to send, eager and rendezvous: nothing is taken for complete too early, nothing is left behind."""
    exchange = Exchange(comm, way, mode=mode)
    for slot in (0, 1023):
        exchange.post(slot, comm.rank, size)
        exchange.assert_received(exchange.left, size)
        exchange.wait(slot)
        assert exchange.table[slot] is None
    assert not exchange.engine.pending()
    assert exchange.counters["posts"] == exchange.counters["completions"] == 2
    assert exchange.counters["failed"] == exchange.counters["unknown"] == 0
    assert exchange.engine.retire()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["pickle", "buffer", "list"])
def test_a_temporary_arrives_whole_although_its_caller_dropped_it(comm, line, way, size):
    """NVIDIA/TensorRT-LLM#3688: no reference but the table's, memory reused, and the receiver is late."""
    exchange = Exchange(comm, way)
    exchange.post(7, comm.rank, size)
    gc.collect()
    for _ in range(20):
        np.full(size, 0xEE, np.uint8)  # what was freed too early is overwritten
    line.meet()
    exchange.assert_received(exchange.left, size)
    exchange.wait(7)


@pytest.mark.parametrize("way", ["array", "buffer", "list"])
def test_a_buffer_lives_until_its_send_is_complete_and_no_longer(comm, line, way):
    """The array is there while nobody has received it and gone once the slot is clear."""
    exchange = Exchange(comm, way)
    array = exchange.post(7, comm.rank, KIB * KIB)
    for _ in range(10):
        assert not exchange.engine.drive()
    gc.collect()
    assert exchange.table[7] is not None
    assert array() is not None
    line.meet()
    exchange.assert_received(exchange.left, KIB * KIB)
    exchange.wait(7)
    gc.collect()
    assert array() is None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("size", "turns"), [(EAGER, 3000), (64 * KIB, 100)])
def test_many_sends_leave_nothing_behind(comm, line, size, turns, keep):
    """The heap grows by less than a tenth of what was sent; the control, which keeps the handles, finds more."""
    exchange, kept, warm = Exchange(comm), [], 50

    def run(count):
        for turn in range(count):
            slot = turn % 1024
            if comm.rank == 0:
                request = exchange.comm.isend(bytes(size), 1, TAG)
                exchange.table[slot] = request
                exchange.wait(slot)
                if keep:
                    kept.append((request, bytes(size)))
            elif comm.rank == 1:
                exchange.receive(size)
        gc.collect()

    run(warm)
    tracemalloc.start()
    run(turns)
    grown, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    line.meet()  # who has nothing to do waits outside MPI
    if comm.rank == 0:
        assert (grown > turns * size) if keep else (grown < turns * size / 10)
        assert exchange.counters["posts"] == exchange.counters["completions"] == turns + warm


@pytest.mark.parametrize("driven", [True, False])
def test_drives_alone_move_a_rendezvous(comm, line, driven):
    """The receiver gets 1 MiB while its sender does nothing but drive; the control, without drives, finds it parked."""
    exchange = Exchange(comm)
    if comm.rank == 0:
        exchange.post(0, 0, KIB * KIB)
        line.tell(1)
        arrived = None
        if driven:
            for _ in range(int(LIMIT_S / 1e-4)):
                exchange.engine.drive()
                if (arrived := line.hear(1, timeout=1e-4)) is not None:
                    break
            assert arrived is not None
        else:
            assert line.hear(1, timeout=0.5) is None
            assert exchange.table[0] is not None
        exchange.wait(0)
        if not driven:
            assert line.hear(1) is not None
    elif comm.rank == 1:
        line.hear(0)
        exchange.assert_received(0, KIB * KIB)
        line.tell(0)
    line.meet()


def test_a_send_stays_tracked_until_a_test_says_so_although_it_was_received(comm, line):
    """openucx/ucx#5947: the receiver's word is no completion; only test() frees the request."""
    exchange = Exchange(comm)
    exchange.post(0, comm.rank, KIB * KIB)
    line.meet()  # with a receiver that is there already the test of the post itself may say so
    exchange.assert_received(exchange.left, KIB * KIB)
    comm.Barrier()
    assert exchange.table[0] is not None
    assert exchange.engine.pending()
    exchange.wait(0)
    assert exchange.table[0] is None


def test_an_eager_send_is_complete_although_nobody_received_it(comm, line):
    """pmodels/mpich#6584: MPI has copied it, so nothing is given up."""
    exchange = Exchange(comm, deadline=0.0)
    exchange.post(0, comm.rank, EAGER)
    exchange.engine.close()
    exchange.wait(0)
    assert exchange.engine.abandoned == []
    assert exchange.counters["posts"] == exchange.counters["completions"] == 1
    line.meet()
    exchange.assert_received(exchange.left, EAGER)


@pytest.mark.parametrize("way", ["pickle", "array", "buffer"])
def test_a_send_given_up_is_kept_whole_and_can_still_be_received(comm, line, keeper, way):
    """open-mpi/ompi#9626: at the deadline nothing is cancelled or freed, and the record names slot, peer and age."""
    exchange = Exchange(comm, way, deadline=0.2)
    exchange.post(5, comm.rank, KIB * KIB)
    handle = exchange.table[5]
    exchange.engine.close()
    exchange.wait(5)
    (given_up,) = exchange.engine.abandoned
    assert exchange.table[5] is None
    assert (given_up.table, given_up.slot, given_up.rank, given_up.peer) == (
        "send_handles",
        5,
        comm.rank,
        exchange.right,
    )
    assert given_up.age_s >= 0.2
    assert exchange.counters["abandoned"] == 1
    until(lambda: [kept.handle is handle for kept in keeper.sends] == [True])
    gc.collect()
    line.meet()
    exchange.assert_received(exchange.left, KIB * KIB)
    until(lambda: not keeper.sends)  # once the right one has received
    line.meet()


class Watched:
    """A request that notices two threads in it."""

    def __init__(self, request, seen):
        self._request, self._seen, self._inside = request, seen, threading.Lock()

    def test(self):
        """Test the request."""
        if not self._inside.acquire(blocking=False):
            self._seen.append("overlap")
            return (False, None)
        try:
            self._seen.append("test")
            return self._request.test()
        finally:
            self._inside.release()


def test_slots_are_used_again_while_another_thread_drives(comm, line):
    """NVIDIA/TensorRT-LLM#7462: wait before reuse, whoever completes a send, and never two threads in one request."""
    exchange, seen, stop, size, turns = Exchange(comm), [], threading.Event(), 64 * KIB, 100

    def relay():
        while not stop.is_set():
            exchange.engine.drive()

    if comm.rank == 0:
        driver = threading.Thread(target=relay, daemon=True)
        driver.start()
        for turn in range(turns):
            slot = turn % 3
            exchange.wait(slot)
            assert exchange.table[slot] is None
            request = exchange.comm.isend(exchange.data(turn, size).tobytes(), 1, TAG)
            exchange.table[slot] = Watched(request, seen)
        for slot in range(3):
            exchange.wait(slot)
            exchange.wait(slot)  # clear: returns at once
        stop.set()
        driver.join(LIMIT_S)
        assert not driver.is_alive()
        assert "overlap" not in seen
        assert exchange.counters["posts"] == exchange.counters["completions"] == turns
        assert exchange.counters["displaced"] == 0
    elif comm.rank == 1:
        for turn in range(turns):
            exchange.assert_received(turn, size)
    line.meet()
