"""The bench's hindrances are what they say: a held GIL, and an exchange that ends when it is told to."""

import itertools
import threading
import time

import pytest
from mpi4py import MPI

from trtllm_pp_progress.tools.bench.floor import floor
from trtllm_pp_progress.tools.bench.hindrances import PostingDist, exchange, hold_gil
from trtllm_pp_progress.tools.job.ranks import quiet_barrier

HOLD_S = 0.2

pytestmark = pytest.mark.mpi(min_size=2)


def test_nothing_runs_while_the_gil_is_held(comm):
    """A thread that notes the time all the while has a hole as long as the hold."""
    stop, moments = threading.Event(), []

    def note():
        while not stop.is_set():
            moments.append(time.monotonic())

    thread = threading.Thread(target=note)
    thread.start()
    hold_gil(HOLD_S)
    stop.set()
    thread.join()
    moments.append(time.monotonic())
    assert max(b - a for a, b in itertools.pairwise(moments)) >= HOLD_S


def test_an_exchange_ends_when_the_even_rank_says_so(comm):
    """Pairs need not end together; a rank without a neighbour has nothing to say."""
    turns = itertools.count()
    trips = exchange(comm, lambda: next(turns) == 3 + comm.rank)
    alone = comm.rank ^ 1 >= comm.size
    assert len(trips) == (0 if alone or comm.rank % 2 else 4 + comm.rank)
    assert all(trip > 0 for trip in trips)


def test_a_sample_state_is_noted_once_it_is_posted(comm):
    """The last rank notes what it sends; the second last, where it ends, what it receives; a schedule is not noted."""
    dist = PostingDist()
    data = b"x" * 10
    request = dist.isend_object(data, dist.next_pp_rank, 20001)
    assert dist.recv_object(dist.prev_pp_rank, 20001) == data
    request.wait()
    assert not dist._posted.acquire(blocking=False)
    if dist.is_last_pp_rank:
        dist.isend_object(data, 0, 20003).wait()
        dist.await_posted(0.01)
    if dist.pp_rank == 0:
        assert dist.recv_object(dist.pp_size - 1, 20003) == data
        assert dist._posted.acquire(blocking=False) == dist.is_second_last_pp_rank
    quiet_barrier(comm)


@pytest.mark.parametrize("between", [(0, 1), (-1, 0)])
def test_the_floor_is_measured_between_two_ranks_and_known_to_all(comm, between):
    """The others wait, asleep, and all are there when it is over."""
    between = tuple(rank % comm.size for rank in between)
    found = floor(comm, 1000, between)
    assert found.ranks == list(between)
    assert found.rounds[0] > 0
    assert found.rounds[1] > 0
    assert comm.allgather(found) == [found] * comm.size
    assert comm.allreduce(1, MPI.SUM) == comm.size
