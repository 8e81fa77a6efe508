"""The keeper: what nobody waits for any more stays alive, is driven until it is complete, and is let go of then."""

import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref

import pytest
from fakes import (
    LIMIT_S,
    NEVER,
    FakeDriver,
    FakeMpi,
    FakeMpiRequest,
    FakeMultiHandleWrapper,
    FakePart,
    FakeParts,
    FakeRequest,
    SendFailedError,
)
from rig import Rig

from trtllm_pp_progress.mpi import facts
from trtllm_pp_progress.progress import keeper as _keeper
from trtllm_pp_progress.progress.engine import RETIRE_S
from trtllm_pp_progress.progress.handles import completion_of
from trtllm_pp_progress.progress.keeper import KEEPER, Keeper, Kept


class Buffer:
    """What a send is made of; it says when it is freed."""


class Posted:
    """A send whose receiver comes late, and what became of it. With `parts` it has pkl5's shape."""

    def __init__(self, parts=False):
        buffer, self.freed, self.tested = Buffer(), threading.Event(), threading.Event()
        self.alive = weakref.ref(buffer)
        weakref.finalize(buffer, self.freed.set).atexit = False
        part = (FakePart if parts else FakeMpiRequest)(NEVER, payload=buffer, inside=self._inside)
        self.ask = weakref.ref(part)
        self.handle = FakeParts([part]) if parts else part

    def _inside(self):
        if threading.current_thread().name == "pp-keeper":
            self.tested.set()

    def is_driven_until_complete_and_freed(self):
        """Let the receiver arrive, once the keeper has tested the send in vain; wait until its buffer is gone."""
        self.handle = None
        assert self.tested.wait(LIMIT_S), "nobody drives it"
        gc.collect()
        assert self.alive() is not None
        self.ask().complete()
        assert self.freed.wait(LIMIT_S), "it is kept although it is complete"


@pytest.fixture
def keeper():
    """Start the process's keeper, without a native driver."""
    KEEPER.start("poll", crowded=False)
    return KEEPER


@pytest.fixture
def posted():
    """Return a send."""
    return Posted()


# Who gives it sends


def test_an_abandoned_send_is_driven_until_it_is_complete(keeper, posted):
    """The wait has ended at the deadline, the send has not."""
    rig = Rig()
    rig.post(posted.handle)
    rig.engine.close()
    rig.wait()
    assert len(rig.engine.abandoned) == 1
    posted.is_driven_until_complete_and_freed()


@pytest.mark.parametrize("known", [True, False], ids=["driven", "fresh"])
@pytest.mark.parametrize("parts", [True, False], ids=["pkl5", "other"])
def test_a_displaced_send_is_driven_until_it_is_complete(known, parts, keeper):
    """Whoever wrote over it, and with what, before anybody looked or after."""
    rig, posted = Rig(), Posted(parts)
    rig.post(posted.handle)
    if known:
        rig.engine.drive()
    rig.post(FakeParts([FakePart(1 if known else NEVER)]) if parts else FakeRequest(NEVER))
    rig.engine.drive()
    assert rig.counters.displaced == 1
    posted.is_driven_until_complete_and_freed()


def test_what_an_engine_lets_go_of_is_driven_until_it_is_complete(keeper, posted):
    """Its table is empty at once, and nothing is pending for it."""
    rig = Rig()
    rig.post(posted.handle)
    rig.engine.let_go()
    assert (rig.table, rig.engine.pending(), rig.engine.abandoned) == ([None] * 4, False, [])
    assert rig.driver.told[-1] == "stop"
    posted.is_driven_until_complete_and_freed()


def test_a_table_that_is_replaced_lets_its_sends_go(keeper, posted):
    """A second table of the same name takes its place: nobody would drive what the first one holds."""
    rig = Rig()
    rig.post(posted.handle)
    rig.table = rig.engine.table("send_handles", [None] * 2)
    posted.is_driven_until_complete_and_freed()


def test_what_cannot_be_tested_is_kept_alive_for_good(kept):
    """A handle left to upstream, of which nobody can tell when it is complete."""
    rig = Rig()
    handle = rig.post(FakeMultiHandleWrapper([]))
    driven = rig.post(FakeMultiHandleWrapper([]), 1)
    rig.engine.drive()
    fresh = rig.post(FakeMultiHandleWrapper([]), 2)
    rig.engine.let_go()
    assert [(record.handle, record.completion) for record in kept] == [(one, None) for one in (handle, driven, fresh)]


def test_a_send_overwritten_by_one_that_is_complete_before_anybody_looked_stays_the_engines():
    """It is not in its slot any more, and is driven all the same."""
    rig = Rig()
    old = rig.post(FakeParts([FakePart(12)]))
    rig.post(FakeParts([FakePart(1)]))
    assert (rig.table[0], rig.engine.pending()) == (None, True)
    assert rig.engine.drive() is False
    assert rig.engine.drive() is True
    assert (old[0].seen, rig.counters.completions, rig.table[0]) == (True, 1, None)


def test_a_stuck_test_does_not_keep_an_engine_from_letting_go(monkeypatch, kept):
    """Whoever is inside a test has the send; the sends of other tables are let go of."""
    monkeypatch.setattr("trtllm_pp_progress.progress.engine.RETIRE_S", 0.01)
    rig = Rig()
    other = rig.engine.table("send_schedule_handles", [None])
    other[0] = handle = FakeRequest(NEVER)
    rig.post(FakeRequest(NEVER))
    with rig.sends.lock:
        rig.engine.let_go()
    assert [record.handle for record in kept] == [handle]


def test_a_collected_executor_lets_go_inside_any_lock(kept):
    """A garbage collection may run in whoever tests an abandoned send of its own: nobody waits, and none is lost."""
    rig = Rig()
    handle = rig.post(FakeRequest(NEVER))
    with rig.sends.lock:
        started = time.monotonic()
        rig.engine.let_go(alone=True)
        assert time.monotonic() - started < RETIRE_S
    assert [record.handle for record in kept] == [handle]


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_send_that_is_in_no_slot_is_the_keepers_when_its_engine_retires(looked_at, kept):
    """What is in its slot is upstream's to wait for; what was overwritten is nobody's."""
    rig = Rig()
    old = rig.post(FakeParts([FakePart(NEVER)]))
    if looked_at:
        rig.engine.drive()
    rig.post(FakeParts([FakePart(1)]))
    in_its_slot = rig.post(FakeParts([FakePart(NEVER)]), 1)
    rig.engine.retire()
    assert [record.handle for record in kept] == [old]
    assert (rig.table[1], rig.engine.pending()) == (in_its_slot, False)


# What it does with them


def test_it_keeps_a_lock_as_others_do(keeper, posted):
    """While another thread is inside a test of the send, the keeper stays out."""
    first, second = Posted(), Posted()
    lock = threading.Lock()
    with lock:
        keeper.keep(Kept(first.handle, completion_of(first.handle), lock))
        keeper.keep(Kept(second.handle, completion_of(second.handle)))
        assert second.tested.wait(LIMIT_S)
        assert first.ask().tests == 0
    first.is_driven_until_complete_and_freed()


def test_a_send_that_raises_is_tested_no_more_and_stays_alive(keeper, posted):
    """Other parts of it may be in flight."""
    posted.ask().fail(SendFailedError("peer gone"))
    other = Posted()
    for one in (posted, other):
        keeper.keep(Kept(one.handle, completion_of(one.handle)))
        one.handle = None
        assert one.tested.wait(LIMIT_S)  # the error knows who was looked at together with its send
    other.is_driven_until_complete_and_freed()
    gc.collect()
    assert posted.alive() is not None
    assert posted.ask().tests == 1


def test_without_sends_its_thread_sleeps(keeper, posted):
    """No wake-up without an end; and again once all are complete."""
    timeouts, asleep = [], threading.Event()
    inbox = _keeper.SimpleQueue()

    class Inbox:
        """Notes how long the keeper is willing to sleep."""

        put = inbox.put

        def get(self, timeout):
            """Get."""
            timeouts.append(timeout)
            if timeout is None and posted.freed.is_set():
                asleep.set()
            return inbox.get(timeout=timeout)

    keeper.stop()
    keeper._clear()
    keeper._inbox = Inbox()
    keeper.start("poll", crowded=False)
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    posted.is_driven_until_complete_and_freed()
    keeper.keep(Kept(FakeRequest(0), None))  # it looks once more
    assert asleep.wait(LIMIT_S)
    assert timeouts[0] is None
    assert set(timeouts[1:]) <= {_keeper.PERIOD_S, _keeper.PATIENT_PERIOD_S, None}


def test_a_receiver_that_stays_away_is_looked_for_less_often(keeper, posted, monkeypatch):
    """After PATIENCE looks in vain the period is the longer one."""
    monkeypatch.setattr(_keeper, "PATIENCE", 2)
    monkeypatch.setattr(_keeper, "PERIOD_S", 0.0001)
    monkeypatch.setattr(_keeper, "PATIENT_PERIOD_S", 0.0002)
    timeouts, seen, inbox = [], threading.Event(), keeper._inbox

    class Inbox:
        """Notes the periods."""

        put = inbox.put

        def get(self, timeout):
            """Get."""
            timeouts.append(timeout)
            if timeout == 0.0002:
                seen.set()
            return inbox.get(timeout=timeout)

    keeper._inbox = Inbox()
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    assert seen.wait(LIMIT_S)
    assert timeouts[:3] == [0.0001] * 2 + [0.0002]
    posted.is_driven_until_complete_and_freed()


def test_sends_may_come_from_a_garbage_collection(keeper):
    """As those of an executor that nobody holds any more do."""
    first, second = Posted(), Posted()

    class Owner:
        """Gives a send to the keeper when it is collected."""

        def __del__(self):
            keeper.keep(Kept(first.handle, completion_of(first.handle)))

    class Cycle:
        """Keeps an owner alive until a collection."""

    cycle = Cycle()
    cycle.self, cycle.owner = cycle, Owner()
    del cycle
    gc.collect()
    keeper.keep(Kept(second.handle, completion_of(second.handle)))
    first.is_driven_until_complete_and_freed()
    second.is_driven_until_complete_and_freed()


# How it ends


@pytest.fixture
def mpi(monkeypatch):
    """Put an MPI in place, and return it."""
    fake = FakeMpi()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    return fake


def test_what_came_a_moment_ago_is_waited_for(monkeypatch):
    """Staged: its thread has not looked yet when somebody waits for all to be finished."""
    keeper, looks = Keeper(), []
    keeper._patience_s = LIMIT_S
    keeper.keep(Kept(handle := FakeRequest(NEVER), completion_of(handle)))

    def sleep(seconds):
        looks.append(seconds)
        keeper.sends.clear()

    monkeypatch.setattr(_keeper.time, "sleep", sleep)
    keeper.finish()
    assert len(looks) == 1


def test_stop_ends_its_thread_and_leaves_sends_alone(keeper, posted):
    """What is kept stays alive, what comes later too, and nothing is tested any more."""
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    assert posted.tested.wait(LIMIT_S)
    thread = keeper._thread
    keeper.stop()
    assert not thread.is_alive()
    tests = posted.ask().tests
    late = Posted()
    keeper.keep(Kept(late.handle, completion_of(late.handle)))
    keeper.start("poll", crowded=False)
    posted.handle = late.handle = None
    gc.collect()
    assert (posted.alive() is None, late.alive() is None) == (False, False)
    assert (posted.ask().tests, late.ask().tests) == (tests, 0)


def test_what_comes_after_its_end_is_a_native_drivers(keeper, posted):
    """At exit upstream may shut down last of all; not once MPI ends, nor what nobody can test."""
    keeper._driver = driver = FakeDriver(native=True)
    keeper.stop(native=False)
    keeper.keep(Kept(object(), None))
    assert driver.told == []
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    assert driver.told == ["start", "arm"]
    facts.note_end()
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    assert driver.told == ["start", "arm"]


@pytest.mark.parametrize("stopped", [False, True])
def test_below_thread_multiple_it_only_keeps(stopped, mpi, keeper, posted):
    """No thread of ours may be in MPI beside upstream's."""
    mpi.level = 2
    keeper._driver = driver = FakeDriver(native=True)
    if stopped:
        keeper.stop(native=False)
    assert keeper.drives is False
    keeper.keep(kept := Kept(posted.handle, completion_of(posted.handle)))
    keeper.stop(native=False)
    assert (keeper.sends, posted.ask().tests, driver.told) == ([kept], 0, [])


def test_after_mpi_s_end_nothing_is_tested(mpi, keeper, posted):
    """Even where nobody has announced that end: mpi4py finalizes at exit, and a collection may come later."""
    mpi.finalized = True
    thread = keeper._thread
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert posted.ask().tests == 0
    posted.handle = None
    gc.collect()
    assert posted.alive() is not None


def test_a_stuck_test_does_not_keep_it_from_stopping(keeper):
    """stop() is bounded."""
    entered, leave = threading.Event(), threading.Event()
    handle = FakeRequest(NEVER, inside=lambda: (entered.set(), leave.wait(LIMIT_S)))
    keeper.keep(Kept(handle, completion_of(handle)))
    assert entered.wait(LIMIT_S)
    thread = keeper._thread
    keeper.stop(0.01)
    assert thread.is_alive()
    leave.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_without_the_parents_sends(keeper, posted):
    """They are the parent's, and so is the thread."""
    keeper.keep(Kept(posted.handle, completion_of(posted.handle)))
    assert posted.tested.wait(LIMIT_S)
    if not (pid := os.fork()):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        os._exit(0 if (keeper.sends, keeper._thread) == ([], None) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_control_a_send_that_nobody_keeps_is_freed(caplog):
    """Without the keeper it would be gone with the last who knew it, though it is not complete."""
    caplog.set_level(logging.CRITICAL)
    posted = Posted()
    posted.handle = None
    gc.collect()
    assert posted.alive() is None
