"""The idle wait: drives pending sends with back-off, and sleeps without waking or testing when there are none."""

import ctypes
import queue
import sys
import threading

import pytest
from fakes import (
    NEVER,
    FakeDriver,
    FakePart,
    FakeParts,
    FakeRequest,
    FakeTester,
    FakeWait,
    elsewhere,
    join,
    start,
)

from trtllm_pp_progress.progress.burst import SLOW_TESTS
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.pyexecutor.relay_queue import GRACE_S, SPIN_S, RelayQueue
from trtllm_pp_progress.settings.core import Settings

SETTINGS = Settings(max_polls=2, backoff_min_us=100, backoff_max_us=400, drain_deadline_s=3)
GRACE_US = round(GRACE_S * 1e6)


class Rig:
    """An engine, its queue on a scripted wait, and one table."""

    def __init__(self, clock, *script, settings=SETTINGS, maxsize=0, driver=None):
        self.clock, self.driver = clock, driver or FakeDriver()
        self.engine = Engine(settings, driver=self.driver, clock=clock, pause=clock.pause)
        self.wait = FakeWait(clock, *script)
        self.queue = RelayQueue(self.engine, maxsize, wait=self.wait)
        self.table = self.engine.table("send_handles", [None] * 8)

    def post(self, handle, slot=0):
        """Write a handle as upstream does, and return it."""
        self.table[slot] = handle
        return handle

    @property
    def waits_us(self):
        """What was waited for, in microseconds; None is a wait without an end."""
        return [timeout if timeout is None else round(timeout * 1e6) for timeout in self.wait.timeouts]


def test_with_nothing_pending_a_get_is_one_untimed_wait(clock):
    """No timed wait, no test, no drive: exactly one sleep until there is an item."""
    rig = Rig(clock, lambda: rig.queue.put("batch"))
    assert rig.queue.get() == "batch"
    assert rig.wait.timeouts == [None]
    assert (rig.queue.timed_waits, rig.table.sends.counters.drives, rig.table.sends.counters.polls) == (0, 0, 0)


def test_an_item_that_is_there_is_returned_without_a_wait(clock):
    """A relay that has work is not held up by pending sends: one test each, which clears what is complete by now."""
    rig = Rig(clock)
    rig.queue.put("batch")
    handles = [rig.post(FakeRequest(answer), slot) for slot, answer in enumerate([NEVER, 1, NEVER])]
    tests = [handle.tests for handle in handles]
    assert rig.queue.get() == "batch"
    assert (rig.wait.timeouts, [handle.tests for handle in handles]) == ([], [n + 1 for n in tests])
    assert list(rig.table[:3]) == [handles[0], None, handles[2]]


def test_a_pending_send_is_driven_between_timed_waits_that_back_off(clock):
    """Drive, wait, drive: pauses double up to the longest, and the wait is untimed again once the send is complete."""
    rig = Rig(clock, None, None, None, None, lambda: rig.queue.put("batch"))
    handle = rig.post(FakeRequest(2 * 5))  # five drives
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [100, 200, 400, 400, None]
    assert (handle.tests, handle.waits, rig.queue.timed_waits, rig.table[0]) == (10, 0, 4, None)


def test_a_send_that_completes_in_the_first_drive_costs_no_timed_wait(clock):
    """The drive comes before the first wait."""
    rig = Rig(clock, lambda: rig.queue.put("batch"))
    rig.post(FakeRequest(2))
    rig.queue.get()
    assert rig.wait.timeouts == [None]


def test_an_item_ends_the_driving_with_the_send_still_pending(clock):
    """A batch that arrives during a timed wait goes out at once; the send stays pending."""
    rig = Rig(clock, None, lambda: rig.queue.put("batch"))
    handle = rig.post(FakeRequest(NEVER))
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [100, 200]
    assert rig.table[0] is handle


def test_the_back_off_starts_anew_once_nothing_is_pending(clock):
    """A later send is driven as often as the first one was."""
    rig = Rig(
        clock,
        None,
        None,
        None,
        lambda: elsewhere(lambda: rig.post(FakeRequest(8), 1)),
        None,
        None,
        None,
        lambda: rig.queue.put("batch"),
    )
    rig.post(FakeRequest(8))
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [100, 200, 400, None, GRACE_US, 100, 200, 400]


def test_each_get_starts_the_back_off_anew(clock):
    """Between two batches the first pause is the shortest."""
    rig = Rig(clock, None, None, lambda: rig.queue.put("a"), lambda: rig.queue.put("b"))
    rig.post(FakeRequest(NEVER))
    assert (rig.queue.get(), rig.queue.get()) == ("a", "b")
    assert rig.waits_us == [100, 200, 400, 100]


def test_a_wake_up_for_nothing_goes_back_to_sleep(clock):
    """A spurious wake-up is answered by another untimed wait, and by no test."""
    rig = Rig(clock, None, None, lambda: rig.queue.put("batch"))
    assert rig.queue.get() == "batch"
    assert rig.wait.timeouts == [None] * 3
    assert (rig.queue.timed_waits, rig.table.sends.counters.drives) == (0, 0)


def test_a_post_wakes_the_sleeping_relay_which_gives_it_grace(clock):
    """What another thread posts during an untimed wait is driven after a moment, then between timed waits."""
    tests = []
    handle = FakeRequest(6)
    rig = Rig(
        clock,
        lambda: elsewhere(lambda: rig.post(handle)),
        lambda: tests.append(handle.tests),
        None,
        lambda: rig.queue.put("batch"),
    )
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [None, GRACE_US, 100, 200]
    assert tests == [0]
    assert rig.table[0] is not None


def test_a_batch_within_the_grace_goes_out_at_once(clock):
    """The ordinary case: the executor posts, computes and hands over its batch; one test on the way, and no drive."""
    handle = FakeRequest(NEVER)
    rig = Rig(clock, lambda: elsewhere(lambda: rig.post(handle)), lambda: rig.queue.put("batch"))
    assert rig.queue.get() == "batch"
    assert (rig.waits_us, handle.tests) == ([None, GRACE_US], 1)


@pytest.mark.parametrize("away", [True, False])
def test_a_pkl5_request_of_another_thread_is_tested_once_as_it_is_posted(clock, away):
    """One that is complete wakes nobody; a relay that sleeps is woken for one that is not."""
    posted = []

    def post(slot, after):
        posted.append(FakePart(after))
        elsewhere(lambda: rig.post(FakeParts([posted[-1]]), slot))

    script = [] if away else [lambda: post(0, 1), lambda: post(1, NEVER), None]
    rig = Rig(clock, *script, lambda: rig.queue.put("batch"))
    rig.queue.get()
    if away:
        post(0, 1)
        post(1, NEVER)
    assert (rig.table[0], rig.table[1]) == (None, (posted[1],))
    assert posted[0].tests == 1
    assert rig.queue.timed_waits == (0 if away else 2)


def test_the_relays_own_send_is_driven_at_once(clock):
    """The thread that will drive it anyway spends one budget on it where it posts it."""
    rig = Rig(clock)
    rig.queue.put("batch")
    rig.queue.get()
    handle = rig.post(FakeRequest(NEVER))
    assert handle.tests == SETTINGS.max_polls
    eager = rig.post(FakeRequest(1), 1)
    assert (eager.tests, rig.table[1]) == (1, None)


def test_another_threads_send_is_left_to_a_relay_that_is_awake(clock):
    """A test would only cost the posting thread the interpreter's lock."""
    rig = Rig(clock, lambda: rig.queue.put("batch"))
    late = FakeRequest(NEVER)
    rig.post(FakeRequest(2, inside=lambda: elsewhere(lambda: rig.post(late, 1)) if rig.table[0].tests == 1 else None))
    seen = []
    rig.wait.script.insert(0, lambda: seen.append(late.tests))
    rig.queue.get()
    assert seen[0] <= SETTINGS.max_polls
    with rig.queue.mutex:
        elsewhere(rig.engine.relay.wake)  # it is awake: nobody waits for the queue's lock


def test_a_real_condition_is_woken_by_a_post():
    """With the condition's own wait, a relay asleep without a time-out drives what is posted to it."""
    seen = threading.Event()
    engine = Engine(SETTINGS)
    relay = RelayQueue(engine)
    table = engine.table("send_handles", [None])
    thread = start(relay.get)
    table[0] = FakeRequest(NEVER, inside=lambda: seen.set() if threading.current_thread() is thread else None)
    assert seen.wait(20)
    table[0].complete()
    relay.put("batch")
    join(thread)


@pytest.mark.parametrize("posted", [True, False], ids=["a send pending", "nothing pending"])
def test_none_is_handed_out_at_once(clock, posted, kept):
    """Nobody of this executor waits for a send any more: it goes to the keeper, without a test or a pause."""
    rig = Rig(clock)
    sent = [rig.post(FakeRequest(NEVER), slot) for slot in range(3 * posted)]
    rig.queue.put(None)
    assert rig.queue.get() is None
    assert ([handle.tests for handle in sent], clock.pauses, rig.wait.timeouts) == ([0] * len(sent), [], [])
    assert [record.handle for record in kept] == sent
    assert (list(rig.table), rig.engine.pending(), rig.engine.abandoned) == ([None] * 8, False, [])
    assert rig.driver.told[-1] == "stop"
    assert rig.engine.deadline is None


def test_none_ends_a_relay_that_drives(clock, kept):
    """As soon as it comes, during a pause, too."""
    rig = Rig(clock, None, lambda: rig.queue.put(None))
    handle = rig.post(FakeRequest(NEVER))
    assert rig.queue.get() is None
    assert rig.waits_us == [100, 200]
    assert [record.handle for record in kept] == [handle]


def test_items_before_none_are_not_a_reason_to_let_go(clock, kept):
    """Only None ends the relay: batches queued before it go out while sends are pending."""
    rig = Rig(clock)
    handle = rig.post(FakeRequest(9))
    for item in ("a", 0, "", None):
        rig.queue.put(item)
    assert [rig.queue.get() for _ in range(3)] == ["a", 0, ""]
    assert (rig.engine.pending(), kept) == (True, [])
    assert rig.queue.get() is None
    assert (rig.engine.pending(), [record.handle for record in kept]) == (False, [handle])


@pytest.mark.parametrize(
    "get", [lambda q: q.get_nowait(), lambda q: q.get(False), lambda q: q.get(True, 0), lambda q: q.get(timeout=0)]
)
def test_any_other_get_is_the_queues_own(clock, get):
    """A get that does not block for ever neither drives nor uses the engine's wait."""
    rig = Rig(clock)
    rig.post(FakeRequest(NEVER))
    with pytest.raises(queue.Empty):
        get(rig.queue)
    rig.queue.put("batch")
    assert get(rig.queue) == "batch"
    assert (rig.wait.timeouts, rig.table.sends.counters.drives) == ([], 0)


def test_it_is_a_queue_of_the_same_size_and_order(clock):
    """First in, first out; a full queue refuses, and a get makes room for a put that waits."""
    rig = Rig(clock, maxsize=2)
    assert isinstance(rig.queue, queue.Queue)
    rig.queue.put(1)
    rig.queue.put(2)
    with pytest.raises(queue.Full):
        rig.queue.put_nowait(3)
    waiting = start(lambda: rig.queue.put(3, timeout=20))
    assert rig.queue.get() == 1
    join(waiting)
    assert (rig.queue.get(), rig.queue.get(), rig.queue.empty()) == (2, 3, True)


def test_the_relay_is_the_thread_that_gets(clock):
    """Era C's flush is recognised by it: nobody before the first get, then that thread."""
    rig = Rig(clock)
    rig.queue.put("batch")
    rig.queue.get_nowait()
    assert not rig.engine.relay.is_current()
    rig.queue.put("batch")
    assert elsewhere(lambda: (rig.queue.get(), rig.engine.relay.is_current())[1])
    assert not rig.engine.relay.is_current()


def test_every_table_is_driven(clock):
    """The relay thread drives what the executor thread posted to the other tables, too."""
    rig = Rig(clock, None, lambda: rig.queue.put("batch"))
    schedule = rig.engine.table("send_schedule_handles", [None])
    schedule[0] = FakeRequest(3)
    assert rig.queue.get() == "batch"
    assert schedule[0] is None


def test_a_handle_that_cannot_be_tested_does_not_keep_the_relay_awake(clock):
    """What is left to upstream's wait is nobody's to poll: the relay sleeps untimed."""
    rig = Rig(clock, lambda: rig.queue.put("batch"))
    rig.post(object())
    assert rig.queue.get() == "batch"
    assert rig.wait.timeouts == [None]


def test_a_retired_engine_lets_the_relay_sleep(clock):
    """Once sends are upstream's again, a pending one is neither driven nor woken for."""
    rig = Rig(clock, lambda: rig.queue.put("batch"))
    handle = rig.post(FakeRequest(NEVER))
    rig.engine.retire()
    tests = handle.tests
    assert rig.queue.get() == "batch"
    assert (rig.wait.timeouts, handle.tests) == ([None], tests)


# Time


@pytest.mark.parametrize("sends", [1, 4])
def test_a_batch_that_comes_during_a_slow_test_is_seen_at_once_after_it(clock, sends):
    """A test of 50 ms ends the drive; with the batch in hand there is one more, for what is complete is to be known."""
    rig = Rig(clock, settings=Settings(max_polls=1000))

    def inside():
        clock.pause(0.05)
        if len(clock.pauses) == 1:
            rig.queue.put("batch")

    handles = [rig.post(FakeRequest(NEVER, inside=inside), slot) for slot in range(sends)]
    assert rig.queue.get() == "batch"
    assert sum(handle.tests for handle in handles) == len(clock.pauses) == 2
    assert rig.wait.timeouts == []


def test_a_relay_does_not_poll_what_is_slow_again_and_again(clock):
    """Its handle is upstream's then, and the relay sleeps without waking."""
    rig = Rig(clock, *[None] * (SLOW_TESTS - 1), lambda: rig.queue.put("batch"))
    handle = rig.post(FakeRequest(NEVER, inside=lambda: clock.pause(0.05)))
    assert rig.queue.get() == "batch"
    assert (handle.tests, rig.table[0]) == (SLOW_TESTS, handle)
    assert rig.wait.timeouts[-1] is None
    assert None not in rig.wait.timeouts[:-1]


# Where tests take no GIL


def test_a_send_on_its_way_is_tested_without_a_pause_at_first(clock):
    """For as long as a spin lasts; a test takes half a millisecond here."""
    rig = Rig(clock, None, lambda: rig.queue.put("batch"), driver=FakeDriver(native=True, tester=FakeTester(1)))
    part = FakePart(NEVER)
    rig.post(FakeParts([part]))
    part.inside = lambda: clock.pause(0.0005)
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [100, 200]
    assert part.tests >= SPIN_S / 0.0005


def test_data_that_moves_is_driven_again_at_once(clock):
    """Where the last drive has moved any there is no pause; the pauses go on growing, for it may be noise."""
    rig = Rig(clock, *[None] * 3, lambda: rig.queue.put("batch"), driver=FakeDriver(native=True, tester=FakeTester(1)))
    part = FakePart(NEVER)
    rig.post(FakeParts([part]))

    def inside():
        clock.pause(0.003)
        rig.driver.tester.made[0].moved = part.tests in (6, 7)

    part.inside = inside
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [100, 200, 400, 400]
    assert (
        part.tests == 9
    )  # as it is written, twice before the first pause, after each pause, twice at once, and at the end


def test_a_batch_ends_a_drive_in_c(clock):
    """The word whose address a drive gets is 0 until there is an item; with the batch in hand there is no such word."""
    tester = FakeTester(1)
    rig = Rig(clock, driver=FakeDriver(native=True, tester=tester))
    part, words = FakePart(NEVER), []
    rig.post(FakeParts([part]))

    def inside():
        clock.pause(0.003)
        if (address := tester.made[0].stops[-1]) is not None:
            word = ctypes.c_int64.from_address(address)
            words.append(word.value)
            if part.tests == 3:
                rig.queue.put("batch")
                words.append(word.value)

    part.inside = inside
    assert rig.queue.get() == "batch"
    assert words == [0, 0, 1]
    assert [stop is None for stop in tester.made[0].stops] == [False, False, True]


# The driver beside it


def test_the_relay_arms_the_driver_while_it_drives_and_rests_it_before_it_sleeps(clock):
    """Armed by tests in vain and at every pause, which is announced; at rest where nothing is pending."""
    rig = Rig(clock, None, None, lambda: rig.queue.put("batch"))
    rig.post(FakeRequest(6))
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [100, 200, None]
    assert [round(seconds * 1e6) for seconds in rig.driver.planned] == [100, 200]
    told = rig.driver.told
    assert told[0] == "arm"
    assert told[-2:] == ["rest", "rest"]
    assert set(told[:-2]) == {"arm"}


def test_with_a_batch_in_hand_and_a_send_pending_it_is_told_that_the_relay_receives(clock):
    """The relay is inside MPI then, as a rule, and drives from there."""
    rig = Rig(clock)
    rig.post(FakeRequest(NEVER))
    rig.queue.put("batch")
    rig.queue.get()
    assert rig.driver.told[-1] == "receiving"


def test_the_relay_measures_how_late_it_wakes(clock):
    """A pause of 100 us that took 50 ms longer."""
    rig = Rig(clock, lambda: clock.pause(0.05), lambda: rig.queue.put("batch"))
    rig.post(FakeRequest(NEVER))
    rig.queue.get()
    assert rig.driver.late == [pytest.approx(0.05), pytest.approx(0.0)]


# The end of the process


def test_a_relay_that_keeps_out_of_mpi_only_waits(clock):
    """No test, whatever is pending, and no timed wait: MPI may be finalized at any moment."""
    rig = Rig(clock, lambda: rig.queue.put("batch"))
    handle = rig.post(FakeRequest(NEVER))
    rig.engine.relay.out = True
    assert rig.queue.get() == "batch"
    assert (rig.wait.timeouts, handle.tests) == ([None], 0)
    rig.queue.put("another")
    assert rig.queue.get() == "another"
    assert handle.tests == 0


def test_a_relay_that_drives_leaves_mpi_when_it_is_told_to(clock):
    """During a pause: the next one has no end."""
    rig = Rig(clock, None, lambda: setattr(rig.engine.relay, "out", True), lambda: rig.queue.put("batch"))
    handle = rig.post(FakeRequest(NEVER))
    assert rig.queue.get() == "batch"
    assert (rig.waits_us, handle.tests) == ([100, 200, None], 2 * SETTINGS.max_polls)


# Turned off for a while


def test_a_relay_that_is_turned_off_only_waits(clock):
    """As upstream's does: no test, no timed wait; turned on again in its sleep it drives what is pending."""
    rig = Rig(clock, lambda: elsewhere(lambda: rig.engine.turn(True)), None, lambda: rig.queue.put("batch"))
    rig.engine.turn(False)
    handle = rig.post(FakeRequest(NEVER))
    rig.queue.put("first")
    assert (rig.queue.get(), handle.tests, rig.wait.timeouts) == ("first", 0, [])
    assert rig.queue.get() == "batch"
    assert rig.waits_us == [None, GRACE_US, 100]
    assert handle.tests > 0


# Python 3.13's Queue.shutdown()


class ShutDown(Exception):
    """Queue.ShutDown where there is none."""


@pytest.mark.parametrize("pending", [True, False])
def test_a_get_ends_where_the_queue_is_shut_down(clock, pending, monkeypatch):
    """As it is seen from Python 3.13 on: an attribute, and everybody is notified. A later get() does not sleep."""
    monkeypatch.setattr(queue, "ShutDown", ShutDown, raising=False)
    rig = Rig(clock, lambda: setattr(rig.queue, "is_shutdown", True))
    if pending:
        rig.post(FakeRequest(NEVER))
    for _ in range(2):
        with pytest.raises(ShutDown):
            rig.queue.get()
    assert rig.waits_us == ([100] if pending else [None])


@pytest.mark.skipif(sys.version_info < (3, 13), reason="Queue.shutdown() is new in Python 3.13")
def test_a_real_shutdown_ends_a_get_that_sleeps():
    """What is queued is handed out first."""
    relay = RelayQueue(Engine(SETTINGS))
    relay.put("batch")
    relay.shutdown()
    assert relay.get() == "batch"
    with pytest.raises(queue.ShutDown):
        relay.get()
    asleep, ended = RelayQueue(Engine(SETTINGS)), []

    def get():
        try:
            asleep.get()
        except queue.ShutDown:
            ended.append(True)

    thread = start(get)
    asleep.shutdown()
    join(thread)
    assert ended == [True]


# The fakes


def test_the_fake_wait_notices_a_sleep_for_ever(clock):
    """Control: a get that nothing would end is an error, not a hang."""
    rig = Rig(clock)
    with pytest.raises(AssertionError, match="sleep for ever"):
        rig.queue.get()


@pytest.mark.parametrize(("inline", "native", "drives"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_where_the_executor_relays_an_idle_relay_sleeps_on_beside_a_native_driver(clock, inline, native, drives):
    """It would contend for the GIL and the locks of those whose sends they are; without one it is all there is."""
    engine = Engine(SETTINGS, driver=FakeDriver(native=native), clock=clock, pause=clock.pause)
    wait = FakeWait(clock, lambda: relay.put("batch"))
    relay = RelayQueue(engine, inline=inline, wait=wait)
    engine.table("send_handles", [None])[0] = handle = FakeRequest(NEVER)
    before = handle.tests
    assert relay.get() == "batch"
    assert bool(handle.tests - before - 1) == bool(drives)  # one test with the batch in hand
    assert (wait.timeouts == [None]) is not bool(drives)
