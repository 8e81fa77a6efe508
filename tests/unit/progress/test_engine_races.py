"""Races, staged: events decide who is where, and requests fail if two threads are ever inside at once."""

import contextlib
import random
import sys
import threading

import fakes
import pytest
from fakes import (
    LIMIT_S,
    NEVER,
    FakeClock,
    FakeDriver,
    FakeRequest,
    FakeWait,
    HookedLock,
    SendFailedError,
    elsewhere,
    join,
    start,
)
from rig import Rig

from trtllm_pp_progress.progress import burst as _burst
from trtllm_pp_progress.progress import slot_wait as _slot_wait
from trtllm_pp_progress.progress import table as _table
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue
from trtllm_pp_progress.settings.core import Settings

SETTINGS = Settings(max_polls=1, drain_deadline_s=1, backoff_max_us=1e5)


class NoLock:
    """The lock removed: for negative controls."""

    def acquire(self, blocking=True, timeout=-1):
        """Take nothing."""
        return True

    def release(self):
        """Give nothing back."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class Stage:
    """Holds the first thread that is inside a request's test until it is let go."""

    def __init__(self):
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self):
        """Enter, and stay if this is the first."""
        if not self.entered.is_set():
            self.entered.set()
            assert self.leave.wait(LIMIT_S)


def expect_faults():
    """Return the faults that a negative control was to provoke, and forget them."""
    faults, fakes.FAULTS[:] = list(fakes.FAULTS), []
    return faults


# Two threads, one request


def a_waiter_meets_a_tester(rig):
    """Let a thread wait for a send while another one is inside its test."""
    stage = Stage()
    handle = FakeRequest(NEVER, inside=stage)
    rig.table[0] = handle
    driver = start(rig.engine.drive, "driver")
    assert stage.entered.wait(LIMIT_S)

    def let_go():
        handle.complete()
        stage.leave.set()
        join(driver)

    rig.clock.on_pause = let_go
    try:
        rig.wait()
    finally:
        stage.leave.set()
        join(driver)
    return handle


def test_a_waiter_stays_out_while_another_thread_tests():
    """It pauses, and finds the slot clear afterwards: one test in all, no wait."""
    rig = Rig(SETTINGS, slots=2)
    handle = a_waiter_meets_a_tester(rig)
    assert (handle.tests, handle.waits, rig.table[0], rig.upstream_waits) == (1, 0, None, [])
    assert (rig.sends.counters.busy, len(rig.clock.pauses)) == (1, 1)


def test_without_the_lock_the_waiter_would_be_caught():
    """Control: the same scenario with the lock removed has two threads in one request, and the request says so."""
    rig = Rig(SETTINGS, slots=2)
    rig.sends.lock = NoLock()
    with contextlib.suppress(AssertionError):
        a_waiter_meets_a_tester(rig)
    assert "test while another thread was inside" in expect_faults()


def two_drivers_meet(rig, drive):
    """Let a thread drive while another one is inside a test."""
    stage = Stage()
    handle = FakeRequest(1, inside=stage)
    rig.table[0] = handle
    first = start(rig.engine.drive, "first")
    assert stage.entered.wait(LIMIT_S)
    try:
        return elsewhere(drive), handle
    finally:
        stage.leave.set()
        join(first)


@pytest.mark.parametrize("one_slot", [True, False], ids=["one slot", "all slots"])
def test_a_second_driver_leaves_at_once(one_slot):
    """It returns while the first one is still inside: a try-lock, never a wait."""
    rig = Rig(SETTINGS, slots=2)
    drive = (lambda: rig.engine.progress_pp_send_handles(rig.table, 0)) if one_slot else rig.engine.drive
    clear, handle = two_drivers_meet(rig, drive)
    assert (clear, handle.tests, rig.sends.counters.busy, rig.table[0]) == (False, 1, 1, None)


@pytest.mark.parametrize("one_slot", [True, False], ids=["one slot", "all slots"])
def test_without_the_lock_the_second_driver_would_be_caught(one_slot):
    """Control: with the lock removed the second driver is seen inside the request."""
    rig = Rig(SETTINGS, slots=2)
    rig.sends.lock = NoLock()
    drive = (lambda: rig.engine.progress_pp_send_handles(rig.table, 0)) if one_slot else rig.engine.drive
    two_drivers_meet(rig, drive)
    assert expect_faults() == ["test while another thread was inside"]


def test_two_threads_do_not_meet_in_a_plain_list_either():
    """A list of an executor made before the patch is guarded by one lock as well."""
    rig, stage = Rig(SETTINGS, slots=2), Stage()
    plain = [FakeRequest(1, inside=stage)]
    first = start(lambda: rig.engine.progress_pp_send_handles(plain, 0))
    assert stage.entered.wait(LIMIT_S)
    assert elsewhere(lambda: rig.engine.progress_pp_send_handles(plain, 0)) is False
    stage.leave.set()
    join(first)
    assert plain == [None]


def test_an_abandoning_thread_waits_for_the_tester(monkeypatch):
    """At the deadline a send whose test is under way gets a little longer; completed by then, it is not abandoned."""
    monkeypatch.setattr(_slot_wait, "LAST_S", LIMIT_S)
    rig, stage = Rig(SETTINGS, slots=2), Stage()
    handle = FakeRequest(1, inside=stage)
    rig.table[0] = handle
    driver = start(rig.engine.drive)
    assert stage.entered.wait(LIMIT_S)
    rig.engine.close()
    rig.clock.now += 2
    rig.sends.lock = HookedLock(rig.sends.lock, stage.leave.set, blocking=True)
    rig.wait()
    join(driver)
    assert (handle.tests, rig.table[0], rig.engine.abandoned) == (1, None, [])


def test_a_send_is_given_up_while_it_is_being_tested(kept):
    """The table's lock does not come free in time: reported all the same, kept, and complete where the test says so."""
    rig, stage = Rig(SETTINGS, slots=2), Stage()
    rig.table[0] = handle = FakeRequest(NEVER, inside=stage)
    driver = start(rig.engine.drive)
    assert stage.entered.wait(LIMIT_S)
    rig.engine.close()
    rig.clock.now += 2
    rig.wait()
    assert ([sent.slot for sent in rig.engine.abandoned], rig.table[0]) == ([0], None)
    assert [(one.handle, one.lock) for one in kept] == [(handle, rig.sends.lock)]
    handle.complete()
    stage.leave.set()
    join(driver)
    assert (rig.engine.pending(), rig.sends.left) == (False, {})


def test_retire_returns_only_once_nobody_is_inside_a_request():
    """Upstream's wait may follow at once: the last test is over by then, and no other begins."""
    rig, stage = Rig(SETTINGS, slots=2), Stage()
    handle = FakeRequest(NEVER, inside=stage)
    rig.table[0] = handle
    driver = start(rig.engine.drive)
    assert stage.entered.wait(LIMIT_S)
    rig.sends.lock = HookedLock(rig.sends.lock, stage.leave.set, blocking=True)
    elsewhere(rig.engine.retire)
    handle.complete()
    handle.wait()  # a fault, if the driver were still inside
    join(driver)
    assert elsewhere(rig.engine.drive) is True
    assert (handle.tests, handle.waits) == (1, 1)


@pytest.mark.parametrize("plain", [False, True], ids=["table", "plain list"])
def test_retire_returns_although_a_test_is_stuck(plain):
    """In time, and says so; status() answers meanwhile, and once the test is over retire() says that, too."""
    rig, stage = Rig(SETTINGS, slots=2), Stage()
    handles = [None, None] if plain else rig.table
    handles[0] = FakeRequest(NEVER, inside=stage)
    driver = start(lambda: rig.engine.progress_pp_send_handles(handles, 0))
    assert stage.entered.wait(LIMIT_S)
    assert elsewhere(lambda: rig.engine.retire(0.01)) is False
    assert elsewhere(rig.engine.status)["tables"]["send_handles"]["drives"] == 0
    assert driver.is_alive()
    stage.leave.set()
    join(driver)
    assert elsewhere(lambda: rig.engine.retire(0.01)) is True
    assert (rig.driver.told[-1], rig.engine.pending()) == ("stop", False)


@pytest.mark.parametrize("plain", [False, True])
def test_a_waiter_that_sees_the_retirement_first_waits_for_the_tester(plain):
    """retire() has begun and a thread is still inside its last test: upstream's wait comes after it."""
    rig, stage = Rig(SETTINGS, slots=2), Stage()
    handle = FakeRequest(1, inside=stage)
    handles = [handle] if plain else rig.table
    handles[0] = handle
    driver = start(lambda: rig.engine.progress_pp_send_handles(handles, 0))
    assert stage.entered.wait(LIMIT_S)
    rig.engine.retired = True
    sends = rig.engine.sends_of(handles)
    sends.lock = HookedLock(sends.lock, lambda: (stage.leave.set(), join(driver)), blocking=True)
    wait_for_slot(rig.engine, handles, 0, lambda: rig.upstream_waits.append(driver.is_alive()))
    assert rig.upstream_waits == [False]


# A completion between check and wait


@pytest.mark.parametrize("call", ["progress", "wait"])
def test_a_completion_between_check_and_lock_is_found(call):
    """A slot taken for pending that another thread completes meanwhile: clear, at once, with no error or test."""
    rig = Rig(SETTINGS, slots=2)
    handle = FakeRequest(1)
    rig.table[0] = handle
    rig.sends.lock = HookedLock(rig.sends.lock, lambda: elsewhere(rig.engine.drive))
    if call == "progress":
        assert rig.engine.progress_pp_send_handles(rig.table, 0) is True
    else:
        rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits, rig.clock.pauses) == (1, 0, [], [])


def test_a_completion_during_a_pause_ends_the_wait():
    """Another thread's drive completes the send while the waiter pauses."""
    rig = Rig(SETTINGS, slots=2)
    handle = FakeRequest(2)
    rig.table[0] = handle
    rig.clock.on_pause = lambda: elsewhere(rig.engine.drive)
    rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits, len(rig.clock.pauses)) == (2, 0, [], 1)


def test_a_failure_during_a_pause_sends_the_waiter_to_upstreams_wait():
    """Another thread's drive finds the send broken: the waiter meets the error where upstream would."""
    rig = Rig(SETTINGS, slots=2)
    handle = FakeRequest(NEVER)
    rig.table[0] = handle
    rig.clock.on_pause = lambda: (handle.fail(SendFailedError()), elsewhere(rig.engine.drive))
    with pytest.raises(SendFailedError):
        rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits) == (2, 1, [0])


@pytest.mark.parametrize("other", ["another wait", "the relay's end"])
def test_two_threads_give_up_one_send_once(other, kept):
    """Cleanup's wait meets another one, or the relay's last get(), at the deadline: the keeper gets it once."""
    rig = Rig(SETTINGS, slots=2)
    rig.table[0] = handle = FakeRequest(NEVER)
    rig.engine.drive()
    rig.engine.close()
    rig.clock.now += 2
    rig.engine.progress_pp_send_handles = lambda handles, slot: handles[slot] is None
    end = rig.wait if other == "another wait" else rig.engine.let_go
    rig.sends.lock = HookedLock(rig.sends.lock, lambda: elsewhere(end))
    rig.wait()
    assert ([record.handle for record in kept], rig.table[0]) == ([handle], None)
    assert len(rig.engine.abandoned) == rig.sends.counters.abandoned == (other == "another wait")


# Slot reuse


def write_as_soon_as_clear(monkeypatch, module, table, slot, handle):
    """Let another thread write to a slot the moment it is clear, before its clearer does anything else."""
    real, todo = module.clear_slot, [handle]

    def clear_slot(handles, index):
        real(handles, index)
        if todo and index == slot:
            elsewhere(lambda: table.__setitem__(slot, todo.pop()))

    monkeypatch.setattr(module, "clear_slot", clear_slot)


def test_a_slot_written_the_moment_it_is_clear_holds_the_new_send(monkeypatch, kept):
    """The old send is complete, not displaced; the new one is pending, and driven to its own completion."""
    rig = Rig(SETTINGS, slots=2)
    old, new = FakeRequest(1), FakeRequest(3)
    rig.table[0] = old
    write_as_soon_as_clear(monkeypatch, _burst, rig.table, 0, new)
    rig.engine.drive()
    assert (rig.table[0], kept, rig.engine.pending()) == (new, [], True)
    rig.wait()
    assert (old.tests, new.tests, rig.table[0]) == (1, 3, None)
    assert (rig.sends.counters.completions, rig.sends.counters.displaced) == (2, 0)


@pytest.mark.parametrize("how", ["abandoned", "let go"])
def test_a_slot_written_the_moment_its_send_was_given_up_holds_the_new_send(how, monkeypatch, kept):
    """Giving up a send takes away that send alone."""
    rig = Rig(SETTINGS, slots=2)
    old, new = FakeRequest(NEVER), FakeRequest(1)
    rig.table[0] = old
    rig.engine.close()
    rig.clock.now += 2
    write_as_soon_as_clear(monkeypatch, _slot_wait if how == "abandoned" else _table, rig.table, 0, new)
    if how == "abandoned":
        rig.wait()
    else:
        rig.engine.let_go()
    assert [record.handle for record in kept] == [old]
    assert rig.table[0] is new
    rig.wait()
    assert (rig.table[0], new.tests, rig.sends.counters.displaced) == (None, 1, 0)


@pytest.mark.parametrize("after", [1, NEVER], ids=["completes", "pends"])
def test_a_slot_overwritten_during_its_test_keeps_the_new_send(after, kept):
    """Whatever the old send's test says, the new one's slot is not cleared, and it is driven on its own."""
    rig = Rig(SETTINGS, slots=2)
    new = FakeRequest(2)
    old = FakeRequest(
        after, inside=lambda: elsewhere(lambda: rig.table.__setitem__(0, new)) if old.tests == 1 else None
    )
    rig.table[0] = old
    rig.engine.drive()
    assert (rig.table[0], new.tests) == (new, 0)
    rig.wait()
    assert (new.tests, rig.table[0]) == (2, None)
    assert [record.handle for record in kept] == [old]


@pytest.mark.parametrize("value", [None, FakeRequest(2)], ids=["None", "another send"])
@pytest.mark.parametrize("budget", [1, 2, 8])
def test_a_slot_written_while_another_one_is_tested_does_not_disturb_the_drive(value, budget):
    """A drive that finds a slot changed under it goes on, and what was written there is what counts."""
    rig = Rig(Settings(max_polls=budget, backoff_max_us=1e5), slots=2)
    if value is not None:
        value = FakeRequest(2)
    first = FakeRequest(
        3, inside=lambda: elsewhere(lambda: rig.table.__setitem__(1, value)) if first.tests == 1 else None
    )
    rig.table[0], rig.table[1] = first, FakeRequest(NEVER)
    rig.engine.drive()
    assert rig.table[1] in (None, value)
    for slot in (0, 1):
        rig.wait(slot)
    assert rig.table == [None, None]
    assert (first.tests, rig.upstream_waits) == (3, [])


# Posts while the driver goes to sleep


class LookedAt(Engine):
    """An engine that runs something before or after a get() first asks it whether anything is pending."""

    asked, before, after = 0, None, None

    def pending(self):
        """Whether any send may be pending, asked for the first time with the queue's lock held."""
        self.asked += 1
        self._once("before")
        answer = super().pending()
        self._once("after")
        return answer

    def _once(self, name):
        if self.asked == 1 and (hook := getattr(self, name)) is not None:
            setattr(self, name, None)
            hook()


class Sleeper:
    """A relay thread on a real condition; `before_sleep` runs in it, queue locked, before its first untimed wait."""

    def __init__(self, wakes=True):
        self.engine = LookedAt(Settings(max_polls=1, backoff_min_us=1e6, backoff_max_us=1e6))
        self.queue = RelayQueue(self.engine, wait=self._wait)
        self.table = self.engine.table("send_handles", [None])
        self.waking, self.driven = threading.Event(), threading.Event()
        wake = self.engine.relay.wake
        self.engine.relay.wake = lambda: (self.waking.set(), wake() if wakes else None)
        self.before_sleep = lambda: None
        self.timeouts, self.items = [], []
        self.handle = FakeRequest(1, inside=self._inside)
        self.thread = threading.Thread(target=self._loop, name="relay", daemon=True)
        self.poster = threading.Thread(
            target=lambda: self.table.__setitem__(0, self.handle), name="poster", daemon=True
        )

    def run(self):
        """Start the relay thread."""
        self.thread.start()

    def post(self):
        """Post from another thread, and return once it is about to wake the relay."""
        self.poster.start()
        assert self.waking.wait(LIMIT_S)

    def end(self):
        """End both threads."""
        self.queue.put("batch")
        self.queue.put(None)
        join(self.poster, self.thread)

    def _loop(self):
        while (item := self.queue.get()) is not None:
            self.items.append((item, self.handle.tests))
            self.engine.asked = 0

    def _wait(self, condition, timeout):
        self.timeouts.append(timeout)
        if timeout is None:
            before, self.before_sleep = self.before_sleep, lambda: None
            before()
        condition.wait(timeout)

    def _inside(self):
        if threading.current_thread() is self.thread:
            self.driven.set()


def test_a_post_after_the_decision_to_sleep_wakes_the_relay():
    """It was decided that nothing is pending; the post comes before the sleep; the relay is woken and drives."""
    sleeper = Sleeper()
    sleeper.before_sleep = sleeper.post
    sleeper.run()
    assert sleeper.driven.wait(LIMIT_S)
    sleeper.end()
    assert sleeper.timeouts[0] is None
    assert (sleeper.items, sleeper.table) == ([("batch", 1)], [None])


def test_without_the_wake_up_the_post_would_be_lost():
    """Control: the same scenario without the notification leaves the send untouched until the next batch."""
    sleeper = Sleeper(wakes=False)
    sleeper.before_sleep = sleeper.post
    sleeper.run()
    assert sleeper.waking.wait(LIMIT_S)
    join(sleeper.poster)
    assert not sleeper.driven.is_set()
    sleeper.end()
    assert sleeper.items == [("batch", 1)]


def test_a_post_just_before_the_question_is_seen_by_it():
    """The relay says that it sleeps, then asks what is pending: a post in between is driven before it sleeps."""
    sleeper = Sleeper()
    sleeper.engine.before = sleeper.post
    sleeper.run()
    assert sleeper.driven.wait(LIMIT_S)
    sleeper.end()
    assert {*sleeper.timeouts} <= {None}
    assert (sleeper.items, sleeper.table) == ([("batch", 1)], [None])


def test_a_post_just_after_the_answer_wakes_the_relay():
    """A relay that was awake says that it sleeps before it asks: a post that the answer missed wakes it."""
    sleeper = Sleeper()
    asleep = threading.Event()
    sleeper.before_sleep = asleep.set
    sleeper.run()
    assert asleep.wait(LIMIT_S)
    sleeper.engine.after = sleeper.post  # for the next get()
    sleeper.queue.put("first")
    assert sleeper.driven.wait(LIMIT_S)
    sleeper.end()
    assert (sleeper.items, sleeper.table) == ([("first", 0), ("batch", 1)], [None])


def test_a_post_during_a_drive_is_driven_before_the_next_sleep():
    """The poster leaves a send to a relay that is awake, and the relay does not sleep untimed without it."""
    clock = FakeClock()
    engine = Engine(SETTINGS, clock=clock, pause=clock.pause)
    wait = FakeWait(clock, None, None, lambda: relay.put("batch"))
    relay = RelayQueue(engine, wait=wait)
    table = engine.table("send_handles", [None, None])
    late = FakeRequest(1)

    def post_late():
        if early.tests == 2:  # within the second drive, with the relay awake
            elsewhere(lambda: table.__setitem__(1, late))
            assert late.tests == 0

    early = FakeRequest(2, inside=post_late)
    table[0] = early
    assert relay.get() == "batch"
    assert wait.timeouts[-1] is None
    assert None not in wait.timeouts[:-1]
    assert (late.tests, table) == (1, [None, None])


def test_retire_waits_for_the_tests_at_a_post():
    """MPI may be finalized right after retire(): the relay's burst on its own send is over by then."""
    rig, retiring, early, seen = Rig(Settings(max_polls=1000), by_relay=True), threading.Event(), [], []
    rig.driver.stop = lambda timeout_s: retiring.set()  # what retire() does after it has said so
    other = threading.Thread(target=lambda: (rig.engine.retire(LIMIT_S), seen.append(handle.tests)), daemon=True)

    def inside():
        if handle.tests == 3:
            other.start()
            assert retiring.wait(LIMIT_S)
        early.extend(seen)

    handle = FakeRequest(NEVER, inside=inside)
    rig.table[0] = handle
    join(other)
    assert (early, seen, handle.tests) == ([], [1000], 1000)


# Everything at once


def test_threads_that_post_wait_and_drive_at_random_never_meet():
    """Three threads post and wait, two drive, the interpreter switching as often as it can; all sends complete."""
    owners, each, slots = 3, 150, 6
    engine = Engine(Settings(max_polls=3), driver=FakeDriver(), pause=lambda seconds: None)
    table = engine.table("send_handles", [None] * slots)
    finished = threading.Event()

    def post(owner):
        dice = random.Random(owner)
        for _ in range(each):
            mine, any_slot = dice.randrange(slots // owners) * owners + owner, dice.randrange(slots)
            wait_for_slot(engine, table, mine, lambda: pytest.fail("upstream's wait"))
            table[mine] = FakeRequest(dice.randrange(6))
            wait_for_slot(engine, table, any_slot, lambda: pytest.fail("upstream's wait"))

    def drive():
        while not finished.is_set():
            engine.drive()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        drivers = [start(drive, f"driver {number}") for number in range(2)]
        join(*[start(lambda owner=owner: post(owner), f"owner {owner}") for owner in range(owners)])
    finally:
        sys.setswitchinterval(interval)
        finished.set()
    join(*drivers)
    for slot in range(slots):
        wait_for_slot(engine, table, slot, lambda: pytest.fail("upstream's wait"))
    counters = table.sends.counters
    assert (counters.posts, counters.completions, counters.displaced, counters.failed) == (
        owners * each,
        owners * each,
        0,
        0,
    )
    assert table == [None] * slots
