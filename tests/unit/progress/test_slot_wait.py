"""The wait for a slot: it drives instead of blocking, ends at a deadline while closing, and no send is lost to it."""

import gc
import logging
import sys
import threading
import weakref

import pytest
from fakes import (
    LIMIT_S,
    NEVER,
    FakeMpi,
    FakeMultiHandleWrapper,
    FakeRequest,
    FakeWork,
    SendFailedError,
    join,
    start,
)
from rig import PEER, RANK, SETTINGS, Rig

from trtllm_pp_progress.mpi import facts
from trtllm_pp_progress.progress import burst as _burst
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.settings.core import Settings

TABLES = ("send_handles", "send_schedule_handles", "send_expected_batch_num_handles")


@pytest.fixture
def rig():
    """Return a rig whose posts are left to the driver, so that every test is a drive's."""
    return Rig()


@pytest.fixture
def log(caplog):
    """Return a function that lists what was logged so far."""
    caplog.set_level(logging.DEBUG, logger="trtllm_pp_progress")
    return lambda: [record.getMessage() for record in caplog.records]


# In steady state


def test_a_wait_for_an_empty_slot_returns_at_once(rig):
    """Nothing is tested, paused for, or waited for."""
    rig.wait()
    assert (rig.clock.pauses, rig.upstream_waits, rig.counters.drives) == ([], [], 0)


def test_a_wait_drives_with_back_off_until_the_send_is_complete():
    """Between bursts it pauses, doubling from the shortest to the longest, and never blocks in the request."""
    rig = Rig(Settings(max_polls=2, backoff_min_us=50, backoff_max_us=300))
    handle = rig.post(FakeRequest(11))
    rig.wait()
    assert [round(pause * 1e6) for pause in rig.clock.pauses] == [50, 100, 200, 300, 300]
    assert (handle.tests, handle.waits, rig.table[0]) == (11, 0, None)


def test_no_lock_is_held_while_a_wait_pauses(rig):
    """Other threads can drive the table during every pause."""
    rig.post(FakeRequest(35))
    free = []
    rig.clock.on_pause = lambda: free.append(not rig.table.sends.lock.locked())
    rig.wait()
    assert free == [True] * 3


def test_a_wait_has_no_deadline_in_steady_state():
    """A receiver that is an hour late costs an hour, not the data."""
    rig = Rig(Settings(max_polls=1, backoff_min_us=1e6, backoff_max_us=1e6, stall_warning_s=86400))
    handle = rig.post(FakeRequest(NEVER))
    rig.clock.on_pause = lambda: handle.complete() if len(rig.clock.pauses) == 3600 else None
    rig.wait()
    assert rig.table[0] is None
    assert rig.engine.abandoned == []


def test_a_request_with_a_test_is_polled_as_long_as_it_takes(monkeypatch):
    """A receiver that is very late is no reason to stop testing a request that can be tested."""
    monkeypatch.setattr(_burst, "UNCERTAIN_POLLS", many := 400)
    rig = Rig(Settings(max_polls=1000))
    handle = rig.post(FakeRequest(10 * many))
    rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits) == (10 * many, 0, [])


def test_in_steady_state_upstreams_error_is_the_callers(rig, log):
    """A wait for a broken send raises what upstream's own wait raises, and leaves the slot as upstream does."""
    error = SendFailedError("peer gone")
    handle = rig.post(FakeRequest(error=error))
    with pytest.raises(SendFailedError) as raised:
        rig.wait()
    assert raised.value is error
    assert (handle.tests, handle.waits, rig.upstream_waits, rig.table[0]) == (1, 1, [0], handle)
    with pytest.raises(SendFailedError):
        rig.wait()
    assert len(log()) == 1


def test_a_slot_whose_send_failed_can_be_used_again(rig):
    """Once upstream has dealt with a broken send, the next one in its slot is driven like any other."""
    rig.post(FakeRequest(error=SendFailedError()))
    rig.engine.drive()
    rig.table[0] = None
    handle = rig.post(FakeRequest(12))
    rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits) == (12, 0, [])


def test_a_wait_in_progress_becomes_upstreams_when_the_engine_retires(rig):
    """A thread that is waiting goes on with upstream's wait instead of pausing for ever."""
    handle = rig.post(FakeRequest(NEVER))
    rig.clock.on_pause = lambda: (handle.complete(), rig.engine.retire())
    rig.wait()
    assert (rig.upstream_waits, rig.table[0], len(rig.clock.pauses)) == ([0], None, 1)


# While closing


def test_a_closing_wait_ends_at_the_deadline_and_abandons(rig, log, kept):
    """The whole cleanup costs at most the deadline, however many sends are pending, and says what was given up."""
    handles = [rig.post(FakeRequest(NEVER), slot) for slot in range(4)]
    rig.clock.now += 1
    start = rig.clock()
    rig.engine.close()
    for slot in range(4):
        rig.wait(slot)
    assert SETTINGS.drain_deadline_s <= rig.clock() - start < SETTINGS.drain_deadline_s + 0.05
    assert rig.table == [None] * 4
    assert [record.handle for record in kept] == handles
    assert [(given_up.table, given_up.slot, given_up.rank, given_up.peer) for given_up in rig.engine.abandoned] == [
        ("send_handles", slot, RANK, PEER) for slot in range(4)
    ]
    assert all(round(given_up.age_s, 2) == 6 for given_up in rig.engine.abandoned)
    assert rig.upstream_waits == []
    said = [line for line in log() if "abandoned" in line]
    assert len(said) == 4
    assert said[1].startswith(f"rank {RANK}: abandoned the send in send_handles[1] to rank {PEER} after 6.0 s")


def test_an_abandoned_send_is_the_keepers_who_may_test_it(rig, kept):
    """The engine touches it no more; the keeper has what tests it, and the lock of the table it was in."""
    handle = rig.post(FakeRequest(NEVER))
    rig.engine.close()
    rig.wait()
    touches = handle.touches
    rig.engine.drive()
    rig.wait()
    assert handle.touches == touches
    (record,) = kept
    assert (record.handle, record.lock) == (handle, rig.sends.lock)
    handle.complete()
    assert record.completion.done()


def test_an_abandoned_request_lives_on_without_its_engine(rig):
    """It is neither cancelled nor freed, and not even the engine's death lets its buffer go."""
    payload = type("Buffer", (), {})()
    alive = weakref.ref(payload)
    handle = rig.post(FakeRequest(NEVER, payload=payload))
    rig.engine.close()
    rig.wait()
    del payload, handle
    rig.__dict__.clear()
    gc.collect()
    assert alive() is not None
    KEEPER._clear()
    gc.collect()
    assert alive() is None


def test_every_table_is_waited_for_and_counted(rig):
    """As cleanup does: all tables until they are clear; nothing is abandoned while the peer receives."""
    tables = [rig.table, *(rig.engine.table(name, [None] * 2) for name in TABLES[1:])]
    for after, table in zip([25, 45, 65], tables, strict=True):
        table[1] = FakeRequest(after)
    rig.engine.close()
    for table in tables:
        wait_for_slot(rig.engine, table, 1, lambda: pytest.fail("upstream's wait"))
    assert [entry["polls"] for entry in rig.engine.status()["tables"].values()] == [25, 45, 65]
    assert [entry["completions"] for entry in rig.engine.status()["tables"].values()] == [1, 1, 1]
    assert rig.engine.abandoned == []
    assert len(rig.clock.pauses) == 2 + 4 + 6


def test_at_the_deadline_every_table_gives_up(rig, kept):
    """What is pending then is abandoned; broken and unknown handles get upstream's wait."""
    other = rig.engine.table("send_schedule_handles", [None] * 3)
    rig.post(FakeRequest(NEVER), 1)
    other[0], other[1], other[2] = FakeRequest(NEVER), FakeMultiHandleWrapper([]), FakeRequest(error=SendFailedError())
    rig.engine.close()
    rig.wait(1)
    for slot in range(3):
        wait_for_slot(rig.engine, other, slot, lambda slot=slot: (other[slot].wait(), other.__setitem__(slot, None)))
    assert sorted((given_up.table, given_up.slot) for given_up in rig.engine.abandoned) == [
        ("send_handles", 1),
        ("send_schedule_handles", 0),
    ]
    assert other == [None] * 3
    assert not rig.engine.pending()


def test_a_wait_without_time_still_tests_twice():
    """An MPI may complete a send in a test that says no: one no is not enough to give up, even with a budget of one."""
    rig = Rig(Settings(max_polls=1, drain_deadline_s=0))
    rig.engine.close()
    for _ in range(2):
        handle = rig.post(FakeRequest(2))
        rig.wait()
        assert (handle.tests, rig.engine.abandoned, rig.table[0]) == (2, [], None)
    assert rig.counters.completions == 2


def test_a_send_failing_at_the_last_moment_is_not_abandoned():
    """A send that fails or completes in the very last test is treated as that."""
    rig = Rig(Settings(max_polls=1, drain_deadline_s=0))
    rig.post(
        FakeRequest(NEVER, inside=lambda: rig.table[0].fail(SendFailedError()) if rig.table[0].tests == 2 else None)
    )
    rig.engine.close()
    rig.wait()
    assert (rig.engine.abandoned, rig.table[0], rig.upstream_waits) == ([], None, [0])


def test_with_nothing_pending_cleanup_is_immediate(rig):
    """An idle executor closes without a test or a pause."""
    rig.engine.close()
    for slot in range(4):
        rig.wait(slot)
    assert (rig.clock.pauses, rig.counters.drives) == ([], 0)


def test_a_send_posted_while_closing_is_driven_too(rig):
    """Late posts of the relay thread are waited for like the others, until the same deadline."""
    rig.engine.close()
    handle = rig.post(FakeRequest(15))
    rig.wait()
    assert (handle.tests, rig.table[0], rig.engine.abandoned) == (15, None, [])


def test_while_closing_a_broken_send_is_logged_and_dropped(rig, log, kept):
    """Cleanup goes on past a request that raises in test and in wait: one line at the end names its slot."""
    rig.post(FakeRequest(error=SendFailedError("peer gone")), slot=1)
    good = rig.post(FakeRequest(3), slot=2)
    rig.engine.close()
    for slot in range(4):
        rig.wait(slot)
    assert rig.table == [None] * 4
    assert good.tests == 3
    assert rig.clock.pauses == []
    dropped = [said for said in log() if "failed while closing" in said]
    assert len(dropped) == 1
    assert f"rank {RANK}: the send in send_handles[1] to rank {PEER}" in dropped[0]
    assert "SendFailedError: peer gone" in dropped[0]


class Deaf(FakeMultiHandleWrapper):
    """A handle with nothing but wait(), which does not end before it is let go."""

    def __init__(self):
        super().__init__([])
        self.inside, self.leave = threading.Event(), threading.Event()

    def wait(self):
        """Block."""
        super().wait()
        self.inside.set()
        assert self.leave.wait(LIMIT_S)


def test_a_handle_left_to_upstream_gets_a_bounded_wait_while_closing(log, kept):
    """Upstream's wait for it has no end of its own: at the deadline the slot is cleared, and the handle stays alive."""
    rig = Rig(Settings(max_polls=10, drain_deadline_s=0))
    handle = rig.post(Deaf())
    rig.engine.close()
    closer = start(rig.wait, "closer")
    join(closer)
    handle.leave.set()
    assert (rig.upstream_waits, handle.waits) == ([0], 1)
    assert [(given_up.table, given_up.slot) for given_up in rig.engine.abandoned] == [("send_handles", 0)]
    assert (rig.table[0], rig.sends.left) == (None, {})
    assert [(record.handle, record.completion) for record in kept] == [(handle, None)]
    assert any("abandoned the send in send_handles[0]" in said for said in log())


def test_in_steady_state_such_a_wait_has_no_end(rig):
    """Control: the same wait, not closing, is upstream's own and lasts until the handle is complete."""
    handle = rig.post(Deaf())
    waiter = start(rig.wait, "waiter")
    assert handle.inside.wait(LIMIT_S)
    assert waiter.is_alive()
    handle.leave.set()
    join(waiter)
    assert (handle.waits, rig.table[0], rig.engine.abandoned) == (1, None, [])


def test_a_handle_left_to_upstream_that_is_complete_is_seen_complete(rig):
    """Late or not: with no time left its wait is given a moment."""
    rig.post(FakeMultiHandleWrapper([FakeWork(0)]))
    rig.engine.close()
    rig.clock.now += 2 * SETTINGS.drain_deadline_s
    rig.wait()
    assert (rig.table[0], rig.engine.abandoned, rig.upstream_waits) == (None, [], [0])


def test_what_raised_while_closing_stays_alive(rig):
    """One part of it has failed; MPI may still read the buffers of others."""
    payload = type("Buffer", (), {})()
    alive = weakref.ref(payload)
    rig.post(FakeRequest(error=SendFailedError("peer gone"), payload=payload))
    rig.engine.close()
    rig.wait()
    assert rig.table[0] is None
    del payload
    rig.__dict__.clear()
    gc.collect()
    assert alive() is not None


# After the end of MPI


@pytest.fixture
def mpi(monkeypatch):
    """Put an MPI in place, and return it."""
    fake = FakeMpi()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    return fake


HANDLES = {
    "pending": lambda: FakeRequest(NEVER),
    "left": lambda: FakeMultiHandleWrapper([FakeWork(0)]),
    "complete": lambda: FakeRequest(0),
}


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("make", HANDLES.values(), ids=HANDLES)
@pytest.mark.parametrize("how", ["finalized", "begun"])
def test_once_mpi_is_finalized_nothing_is_waited_for(how, make, closing, mpi, rig):
    """Any call would end the process: the wait returns, touches nothing, and does not call upstream's."""
    handle = rig.post(make())
    if isinstance(handle, FakeMultiHandleWrapper):
        rig.engine.drive()
    if closing:
        rig.engine.close()
    if how == "finalized":
        mpi.finalized = True
    else:
        facts.note_end()
    rig.wait()
    touched = handle.waits if isinstance(handle, FakeMultiHandleWrapper) else handle.touches
    assert (touched, rig.upstream_waits, rig.clock.pauses) == (0, [], [])


def test_a_wait_ends_when_mpi_is_finalized_meanwhile(mpi, rig):
    """Another thread finalizes during a pause."""
    handle = rig.post(FakeRequest(NEVER))
    rig.clock.on_pause = mpi.Finalize
    rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits) == (SETTINGS.max_polls, 0, [])
    assert len(rig.clock.pauses) == 1


def test_before_that_it_is_waited_for(mpi, rig):
    """Control: with MPI running the same wait drives, and upstream's is called for what cannot be tested."""
    handle = rig.post(FakeRequest(15))
    rig.wait()
    assert (handle.tests, rig.table[0]) == (15, None)
    rig.post(HANDLES["left"]())
    rig.wait()
    assert rig.upstream_waits == [0]
