"""Sends that nobody waits for any more, over a real MPI: a receiver that comes late finds them all the same."""

import gc
import threading
import time

import pytest
from exchange import TAG, Exchange
from held_gil import received_while_held
from mpi4py.util import pkl5
from outside import LIMIT_S
from rings import until

from trtllm_pp_progress.progress.handles import completion_of
from trtllm_pp_progress.progress.keeper import KEEPER, Kept
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue

pytestmark = pytest.mark.mpi(min_size=2)

SIZE = 1_000_000
SOON_S = 0.5  # from the receive to the data
AWAY_S = 0.3  # longer than it takes the keeper's thread to look twice
TIMES = 3


def give_up(exchange):
    """Post a send and abandon it at its deadline."""
    exchange.post(0, 0, SIZE)
    exchange.engine.reopen()
    exchange.engine.close()
    exchange.wait(0)
    assert exchange.table[0] is None
    gc.collect()


def let_go_by_none(exchange):
    """Post a send as the executor does, and end the relay, whose get() returns upstream's order at once."""
    relay = RelayQueue(exchange.engine)
    exchange.post(0, 0, SIZE)
    relay.put(None)
    thread = threading.Thread(target=relay.get)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the loop's end waits for a send"
    assert exchange.table[0] is None
    assert not exchange.engine.pending()
    assert exchange.engine.abandoned == []
    gc.collect()


def overwrite(exchange):
    """Post a send and write another one to its slot, which nobody waited for."""
    exchange.post(0, 0, SIZE)
    assert not exchange.engine.drive()
    exchange.table[0] = exchange.comm.isend(b"", 1, TAG + 1)
    exchange.wait(0)
    assert exchange.counters["displaced"] == 1


def delivered_after(comm, line, let_go):
    """Return on rank 0 the seconds a late receive took of a sender that is outside MPI, or None if it took too long."""
    exchange = Exchange(comm, deadline=0.05)
    if comm.rank == 0:
        let_go(exchange)
        line.tell(1)
        return line.hear(1, LIMIT_S if KEEPER._thread is not None else SOON_S)
    if comm.rank == 1:
        line.hear(0)
        time.sleep(AWAY_S)  # the scenario's late receiver
        started = time.monotonic()
        exchange.assert_received(0, SIZE)
        line.tell(0, int(1e6 * (time.monotonic() - started)))
        if let_go is overwrite:
            exchange.comm.recv(source=0, tag=TAG + 1)
    return None


WAYS = [give_up, let_go_by_none, overwrite]


@pytest.mark.parametrize("let_go", WAYS)
def test_a_late_receiver_is_served_although_its_sender_stays_away(comm, line, keeper, let_go):
    """Its sender waits outside MPI until it hears that the data is there; nothing of it is left behind.

    Of TIMES receives the quickest, for a busy machine may take its time: half a second is what a reader would notice.
    """
    seconds = [delivered_after(comm, line, let_go) for _ in range(TIMES)]
    if comm.rank == 0:
        assert None not in seconds
        assert min(seconds) / 1e6 < SOON_S
        until(lambda: not keeper.sends)
    line.meet()


@pytest.mark.parametrize("let_go", WAYS)
def test_without_the_keeper_it_is_not(comm, line, let_go):
    """Control: the send is alive, but parked until its sender enters MPI again."""
    assert KEEPER._thread is None
    assert delivered_after(comm, line, let_go) is None
    if comm.rank == 0:
        kept = KEEPER._inbox.get(timeout=LIMIT_S)
        until(kept.completion.done)
        assert line.hear(1) is not None
    line.meet()


@pytest.mark.parametrize("keeper", ["native"], indirect=True)
def test_a_receiver_is_served_while_the_gil_is_held(native, comm, line, shared, keeper):
    """By the keeper's native driver, which steps in once its thread is late."""
    assert received_while_held(native, comm, line, shared, kept(comm, keeper, "armed")) in (True, None)


@pytest.mark.parametrize("keeper", ["poll"], indirect=True)
def test_without_a_native_driver_it_waits_for_the_gil(native, comm, line, shared, keeper):
    """Control: the keeper's own thread needs it."""
    post = kept(comm, keeper, "none")
    assert received_while_held(native, comm, line, shared, post, expected=False) in (False, None)


def kept(comm, keeper, state):
    """Return what gives a send to the keeper on rank 0, until its driver is in a state, and receives it on rank 1."""
    world = pkl5.Intracomm(comm)

    def post(data):
        if data is None:
            return world.recv(source=0, tag=TAG)
        request = world.isend(data, 1, TAG)
        keeper.keep(Kept(request, completion_of(request)))
        until(lambda: keeper.sends and keeper._driver.status()["state"] == state)
        return lambda: until(lambda: not keeper.sends)

    return post
