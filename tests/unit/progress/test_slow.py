"""Tests that take 50 ms each (pmodels/mpich#6836 is of that kind): what they may cost whoever waits for another."""

import threading

import pytest
from fakes import NEVER, FakeDriver, FakePart, FakeParts, FakeRequest, FakeTester, FakeWait, SendFailedError
from rig import Rig

from trtllm_pp_progress.progress.burst import SLOW_TESTS
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue
from trtllm_pp_progress.settings.core import Settings

TEST_S = 0.05
BOUND_S = 0.15  # what a batch that was put, or a deadline, waits for them at most
TABLES = ("send_handles", "send_schedule_handles", "send_expected_batch_num_handles")


def python_send(clock):
    """Return a send that Python tests."""
    return FakeRequest(NEVER, inside=lambda: clock.pause(TEST_S))


def native_send(clock):
    """Return a send that is tested from C, where there is a tester."""
    return FakeParts([FakePart(NEVER, inside=lambda: clock.pause(TEST_S))])


class Slow(Rig):
    """A rig with upstream's three tables, all sends of which are slow to test."""

    def __init__(self, make, deadline_s=1.0, slots=64):
        tester = FakeTester(tests_a_call=1) if make is native_send else None
        super().__init__(Settings(drain_deadline_s=deadline_s), slots, driver=FakeDriver(tester=tester))
        self.make = make
        self.tables = [self.table, *(self.engine.table(name, [None] * slots) for name in TABLES[1:])]

    def fill(self, slots):
        """Post that many sends in each table."""
        for table in self.tables:
            for slot in range(slots):
                table[slot] = self.make(self.clock)

    def clean_up(self, slots):
        """Wait for all slots, as upstream's cleanup does; return the seconds that took. Upstream's wait has no end."""
        started, received = self.clock(), threading.Event()
        self.engine.close()
        for slot in range(slots):
            for table in self.tables:
                wait_for_slot(self.engine, table, slot, received.wait)
        received.set()
        return self.clock() - started


@pytest.mark.parametrize("make", [python_send, native_send])
@pytest.mark.parametrize("deadline_s", [0.0, 0.3, 0.6])  # with 0.6 s it is upstream's wait that ends
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_a_cleanup_ends_at_its_deadline_however_many_sends_are_slow(make, deadline_s, slots, kept):
    """All of them are given up, none is waited for, and the keeper has every one."""
    rig = Slow(make, deadline_s)
    rig.fill(slots)
    assert rig.clean_up(slots) <= deadline_s + BOUND_S
    assert len(rig.engine.abandoned) == len(kept) == 3 * slots


class StuckLock:
    """The lock of a table in which a test is stuck."""

    def __init__(self, clock):
        self._clock = clock

    def acquire(self, blocking=True, timeout=-1):
        """Wait in vain."""
        assert not blocking or timeout >= 0, "a wait for a stuck test has no end"
        self._clock.now += timeout if blocking else 0.0
        return False


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_a_stuck_test_costs_a_cleanup_no_more_than_its_deadline(slots, kept):
    """The waits end and are reported as any other that the deadline ends; the keeper has the sends."""
    rig = Slow(python_send)
    rig.fill(slots)
    for table in rig.tables:
        table.sends.look_at_fresh(rig.engine.leave)
        table.sends.lock = StuckLock(rig.clock)
    assert rig.clean_up(slots) <= 1.0 + BOUND_S
    assert len(rig.engine.abandoned) == len(rig.tables) * slots
    assert all(table[slot] is None for table in rig.tables for slot in range(slots))
    assert {id(one.lock) for one in kept} == {id(table.sends.lock) for table in rig.tables}


def test_a_send_that_was_posted_behind_a_stuck_test_is_given_up_as_well(kept):
    """Nobody has looked at it: it stays with the table, alive, whose next look finds it."""
    rig = Slow(python_send)
    rig.fill(1)
    free, rig.table.sends.lock = rig.table.sends.lock, StuckLock(rig.clock)
    rig.engine.close()
    rig.wait()
    assert (len(rig.engine.abandoned), rig.table[0], len(kept)) == (1, None, 0)
    rig.table.sends.lock = free
    rig.engine.let_go()
    assert len(kept) == len(rig.tables)


def test_sends_that_are_quick_to_test_are_tested_however_late_it_is(kept):
    """What is complete by then is not given up."""
    rig = Slow(lambda clock: FakeRequest(1), deadline_s=0.0)
    rig.fill(64)
    rig.clean_up(64)
    assert rig.engine.abandoned == kept == []


@pytest.mark.parametrize("make", [python_send, native_send])
@pytest.mark.parametrize("when", range(2 * SLOW_TESTS))
def test_a_relay_that_drives_sees_a_new_batch_soon(make, when):
    """Whichever test it is put in, one in each table or more: that test, and one more, is all it waits for."""
    rig = Slow(make)
    rig.fill(4)
    put, tests = [], []
    queue = RelayQueue(rig.engine, wait=FakeWait(rig.clock))

    def inside():
        tests.append(rig.clock())
        if len(tests) == when + 1:
            queue.put("batch")
            put.append(rig.clock())

    rig.clock.on_pause = inside
    assert queue.get() == "batch"
    assert rig.clock() - put[0] <= BOUND_S - TEST_S  # the test in which it was put had begun before


def test_a_send_whose_first_test_from_c_raised_is_not_tested_again():
    """Some requests raise once, then answer yes: it is upstream's to meet what they said."""
    rig = Rig(by_relay=True, driver=FakeDriver(tester=FakeTester()))
    part = FakePart(2, SendFailedError("peer gone"), errors=0)
    handle = FakeParts([part])
    rig.table.sends.slow = True  # not tested as it is written
    part.errors = 1
    rig.post(handle)
    rig.engine.drive()
    assert (part.tests, rig.table[0], rig.engine.pending()) == (1, handle, False)
    assert (rig.counters.posts, rig.counters.failed, rig.counters.completions) == (1, 1, 0)
