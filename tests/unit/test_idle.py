"""The idle wait: drives pending sends with back-off, and sleeps without waking or testing when there are none."""

import logging
import queue
import threading

import pytest
from fakes import NEVER, FakePart, FakeParts, FakeRequest, FakeWait, elsewhere, join, start

from trtllm_pp_progress import _engine
from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._idle import GRACE_S, ProgressQueue
from trtllm_pp_progress._settings import Settings

SETTINGS = Settings(max_polls=2, backoff_min_us=100, backoff_max_us=400, drain_deadline_s=3)
GRACE_US = round(GRACE_S * 1e6)


class Rig:
    """An engine, its queue on a scripted wait, and one table."""

    def __init__(self, clock, *script, settings=SETTINGS, maxsize=0):
        self.clock = clock
        self.engine = Engine(settings, clock=clock, pause=clock.pause)
        self.wait = FakeWait(clock, *script)
        self.queue = ProgressQueue(self.engine, maxsize, wait=self.wait)
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
    assert rig.queue._asleep is False


def test_a_real_condition_is_woken_by_a_post():
    """With the condition's own wait, a relay asleep without a time-out drives what is posted to it."""
    seen = threading.Event()
    engine = Engine(SETTINGS)
    relay = ProgressQueue(engine)
    table = engine.table("send_handles", [None])
    thread = start(relay.get)
    table[0] = FakeRequest(NEVER, inside=lambda: seen.set() if threading.current_thread() is thread else None)
    assert seen.wait(20)
    table[0].complete()
    relay.put("batch")
    join(thread)


def test_none_is_handed_out_once_the_sends_are_drained(clock):
    """Upstream's order to leave comes after the last completion, within the drain's deadline."""
    rig = Rig(clock)
    handle = rig.post(FakeRequest(2 * 3))
    rig.queue.put(None)
    assert rig.queue.get() is None
    assert (handle.tests, rig.table[0], rig.engine.abandoned) == (6, None, [])
    assert [round(pause * 1e6) for pause in clock.pauses] == [100, 200]


def test_none_with_nothing_pending_comes_at_once(clock):
    """An idle relay leaves without a test or a pause."""
    rig = Rig(clock)
    rig.queue.put(None)
    assert rig.queue.get() is None
    assert (clock.pauses, rig.wait.timeouts, rig.table.sends.counters.drives) == ([], [], 0)


def test_none_waits_for_a_receiver_that_has_left_no_longer_than_the_deadline(clock, caplog):
    """The send is abandoned at the deadline and None handed out: a relay's end is bounded."""
    caplog.set_level(logging.ERROR)
    rig = Rig(clock, settings=Settings(max_polls=2, backoff_max_us=1e5, drain_deadline_s=3))
    rig.post(FakeRequest(NEVER))
    start_s = clock()
    rig.queue.put(None)
    assert rig.queue.get() is None
    assert 3 <= clock() - start_s <= 3.1
    assert len(rig.engine.abandoned) == 1
    assert "abandoned" in caplog.text


def test_items_before_none_are_not_a_reason_to_drain(clock):
    """Only None ends the relay: batches queued before it go out while sends are pending."""
    rig = Rig(clock)
    rig.post(FakeRequest(9))
    for item in ("a", 0, "", None):
        rig.queue.put(item)
    assert [rig.queue.get() for _ in range(3)] == ["a", 0, ""]
    assert rig.engine.deadline is None
    assert rig.queue.get() is None
    assert rig.engine.deadline is not None


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


def test_the_consumer_is_the_thread_that_gets(clock):
    """Era C's flush is recognised by it: nobody before the first get, then the relay thread."""
    rig = Rig(clock)
    assert rig.queue.consumer is None
    rig.queue.put("batch")
    ident = elsewhere(lambda: (rig.queue.get(), threading.get_ident())[1])
    assert rig.queue.consumer == ident != threading.get_ident()


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


def test_the_number_of_polls_that_ends_uncertainty_is_finite():
    """A backend that needs wait() keeps the relay awake for a bounded time only."""
    assert 1 <= _engine.UNCERTAIN_POLLS < float("inf")


def test_the_fake_wait_notices_a_sleep_for_ever(clock):
    """Control: a get that nothing would end is an error, not a hang."""
    rig = Rig(clock)
    with pytest.raises(AssertionError, match="sleep for ever"):
        rig.queue.get()
