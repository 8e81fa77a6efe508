"""The progress engine, on fake requests and a fake clock: bounded, never blocking, O(pending), and nothing is lost."""

import gc
import json
import logging
import weakref
from unittest.mock import MagicMock

import fakes
import pytest
from fakes import (
    NEVER,
    FakeClock,
    FakeMpiRequest,
    FakeMultiHandleWrapper,
    FakePlainRequest,
    FakeRequest,
    FakeWork,
    SendFailedError,
    elsewhere,
)

from trtllm_pp_progress import _engine, _table
from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._settings import Settings

SETTINGS = Settings(max_polls=10, drain_deadline_s=5, stall_warning_s=2, backoff_max_us=50_000)
SLOTS = 1024
RANK, PEER = 2, 3


class Rig:
    """An engine with one table, its clock, and an upstream wait that notes its calls."""

    def __init__(self, settings=SETTINGS, slots=4, at_post=0):
        self.clock = FakeClock()
        self.engine = Engine(settings, lambda: (RANK, PEER), self.clock, self.clock.pause)
        self.engine.tests_at_post = lambda: at_post
        self.table = self.engine.table("send_handles", [None] * slots)
        self.counters = self.table.sends.counters
        self.upstream_waits = []

    def post(self, handle, slot=0):
        """Write a handle as upstream does, and return it."""
        self.table[slot] = handle
        return handle

    def upstream_wait(self, slot=0):
        """Wait as upstream does."""
        self.upstream_waits.append(slot)
        self.table[slot].wait()
        self.table[slot] = None

    def wait(self, slot=0):
        """Wait as the patched executor does."""
        self.engine.wait(self.table, slot, lambda: self.upstream_wait(slot))


@pytest.fixture
def rig():
    """Return a rig whose posts are left to the driver, so that every test is a drive's."""
    return Rig()


@pytest.fixture
def log(caplog):
    """Return a function that lists what was logged so far."""
    caplog.set_level(logging.DEBUG, logger="trtllm_pp_progress")
    return lambda: [record.getMessage() for record in caplog.records]


# One drive


@pytest.mark.parametrize("budget", [1, 2, 3, 10, 64])
def test_a_drive_tests_a_pending_send_as_often_as_its_budget(rig, budget):
    """A send that does not complete costs exactly the budget, is still there, and is not complete."""
    handle = rig.post(FakeRequest(NEVER))
    assert rig.engine.progress_pp_send_handles(rig.table, 0, budget) is False
    assert (handle.tests, handle.waits, rig.table[0]) == (budget, 0, handle)
    assert (rig.counters.polls, rig.counters.drives, rig.counters.exhausted) == (budget, 1, 1)


@pytest.mark.parametrize("after", range(1, 11))
def test_a_drive_stops_and_clears_the_slot_as_soon_as_the_send_is_complete(rig, after):
    """No test is made after the one that says complete."""
    handle = rig.post(FakeRequest(after))
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is True
    assert (handle.tests, rig.table[0]) == (after, None)
    assert (rig.counters.completions, rig.counters.exhausted) == (1, 0)


def test_the_budget_defaults_to_the_setting(rig):
    """Without max_polls the configured budget holds, for one slot and for all."""
    handle = rig.post(FakeRequest(NEVER))
    rig.engine.progress_pp_send_handles(rig.table, 0)
    rig.engine.drive()
    assert handle.tests == 2 * SETTINGS.max_polls


def test_an_empty_slot_is_clear_and_costs_nothing(rig):
    """Nothing to do is said without a test, a drive or the lock."""
    rig.table.sends.lock.acquire()
    assert rig.engine.progress_pp_send_handles(rig.table, 1) is True
    assert (rig.counters.drives, rig.counters.busy) == (0, 0)


@pytest.mark.parametrize("budget", [0, -1, 1.5, float("nan"), float("inf"), "x", "8"])
@pytest.mark.parametrize("filled", [True, False])
def test_a_senseless_budget_is_refused_and_named(rig, budget, filled):
    """A budget that is no whole number from 1 is an error that shows it, whatever the slot holds."""
    handle = FakeRequest(NEVER)
    if filled:
        rig.post(handle)
    with pytest.raises(ValueError, match=f"max_polls={budget!r} is not valid: a whole number, at least 1"):
        rig.engine.progress_pp_send_handles(rig.table, 0, budget)
    assert handle.tests == 0


@pytest.mark.parametrize("slot", [4, -5])
def test_a_slot_out_of_range_is_an_index_error(rig, slot):
    """A slot that is not there is the caller's error, as with a list."""
    with pytest.raises(IndexError):
        rig.engine.progress_pp_send_handles(rig.table, slot)
    with pytest.raises(IndexError):
        rig.engine.wait(rig.table, slot, lambda: None)


def test_a_negative_slot_is_the_slot_it_means(rig):
    """As in a list, -1 is the last slot, for a drive and for a wait."""
    rig.post(FakeRequest(2), slot=3)
    assert rig.engine.progress_pp_send_handles(rig.table, -1)
    rig.post(FakeRequest(20), slot=-1)
    rig.wait(-1)
    assert rig.table[3] is None


def test_driving_one_slot_leaves_the_others_alone(rig):
    """Only the asked slot's request is touched, so that a wait for one send costs one send."""
    other, wanted = rig.post(FakeRequest(NEVER), 0), rig.post(FakeRequest(3), 1)
    assert rig.engine.progress_pp_send_handles(rig.table, 1)
    assert (other.tests, wanted.tests) == (0, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 11, 25])
def test_a_drive_of_all_slots_shares_one_budget(count):
    """However many sends are pending, one drive makes the budget of tests, spread evenly from the oldest on."""
    rig = Rig(slots=SLOTS)
    handles = [rig.post(FakeRequest(NEVER), slot) for slot in range(count)]
    assert rig.engine.drive() is False
    tests = [handle.tests for handle in handles]
    assert sum(tests) == rig.counters.polls == SETTINGS.max_polls
    assert max(tests) - min(tests) <= 1
    assert tests == sorted(tests, reverse=True)


def test_a_drive_is_over_when_all_are_complete(rig):
    """The burst ends with the last completion, and the engine has nothing pending."""
    handles = [rig.post(FakeRequest(after), slot) for slot, after in enumerate([1, 3, 2])]
    assert rig.engine.pending
    assert rig.engine.drive() is True
    assert not rig.engine.pending
    assert [handle.tests for handle in handles] == [1, 3, 2]
    assert rig.table == [None] * 4


def test_one_pending_slot_among_a_thousand_is_the_only_one_touched():
    """1,024 slots cost nothing: a drive reads no slot but the one that it clears."""
    rig = Rig(slots=SLOTS)
    handle = rig.post(FakeRequest(2), slot=700)
    reads = []
    plain = type(rig.table).__getitem__
    counting = type(
        "Counting", (type(rig.table),), {"__getitem__": lambda self, index: reads.append(index) or plain(self, index)}
    )
    rig.table.__class__ = counting
    rig.table.__iter__ = None
    rig.engine.drive()
    assert (handle.tests, reads) == (2, [700])


def test_with_nothing_pending_a_drive_takes_no_lock():
    """An idle engine looks at no table's requests and takes no lock, whatever the number of slots."""
    rig = Rig(slots=SLOTS)
    rig.table.sends.lock.acquire()
    assert rig.engine.drive() is True
    assert (rig.counters.drives, rig.counters.busy) == (0, 0)


def test_a_drive_leaves_at_once_where_another_thread_is_at_work(rig):
    """The lock is tried, not waited for: a busy table is counted and skipped, others are driven."""
    handle = rig.post(FakeRequest(NEVER))
    other = rig.engine.table("send_schedule_handles", [None])
    other[0] = FakeRequest(1)
    with rig.table.sends.lock:
        assert elsewhere(lambda: rig.engine.progress_pp_send_handles(rig.table, 0)) is False
        assert elsewhere(rig.engine.drive) is False
    assert (handle.tests, rig.counters.busy, other[0]) == (0, 2, None)


def test_the_lock_is_free_again_after_whatever_a_request_raises(rig):
    """Not even an interrupt inside a test leaves the table locked."""
    rig.post(FakeRequest(error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        rig.engine.drive()
    assert rig.table.sends.lock.acquire(blocking=False)


def test_tables_are_driven_and_counted_apart(rig):
    """Each table has its own budget, lock and counters."""
    tables = {
        name: rig.engine.table(name, [None] * 2)
        for name in ("send_schedule_handles", "send_expected_batch_num_handles")
    }
    for table in tables.values():
        table[1] = FakeRequest(NEVER)
    rig.post(FakeRequest(4))
    rig.engine.drive()
    counted = {name: entry["polls"] for name, entry in rig.engine.status()["tables"].items()}
    assert counted == {"send_handles": 4, "send_schedule_handles": 10, "send_expected_batch_num_handles": 10}


# Handle shapes


@pytest.mark.parametrize("shape", [FakeRequest, FakeMpiRequest, FakePlainRequest, FakeWork])
def test_each_shape_is_driven_to_completion(rig, shape):
    """Every handle with a test or is_completed is driven, and cleared when complete."""
    handle = rig.post(shape(after=12))
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is False
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is True
    assert handle.tests == 12


@pytest.mark.parametrize("at_post", [0, 1])
def test_a_list_is_complete_when_all_its_handles_are(at_post):
    """A slot with several works is cleared once, when the last one is complete."""
    rig = Rig(at_post=at_post)
    works = [FakeWork(3), FakeWork(NEVER), FakeWork(1)]
    rig.post(works)
    assert rig.engine.drive() is False
    assert rig.table[0] is works
    works[1].complete()
    assert rig.engine.drive() is True
    assert rig.table[0] is None


@pytest.mark.parametrize("at_post", [0, 1])
def test_a_handle_without_a_test_is_left_to_upstreams_wait(at_post, log):
    """The Ray path's wrapper is never polled; one warning says so for all its kind, and wait() is upstream's own."""
    rig = Rig(at_post=at_post)
    wrappers = [rig.post(FakeMultiHandleWrapper([FakeWork(0)]), slot) for slot in range(4)]
    assert rig.engine.drive() is True
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is False
    for slot in range(4):
        rig.wait(slot)
    assert rig.upstream_waits == [0, 1, 2, 3]
    assert [wrapper.waits for wrapper in wrappers] == [1] * 4
    assert rig.table == [None] * 4
    assert rig.counters.unknown == 4
    (said,) = log()
    assert "send_handles[0]" in said
    assert "FakeMultiHandleWrapper" in said
    assert rig.clock.pauses == []


@pytest.mark.parametrize("at_post", [0, 1])
def test_a_mock_is_left_to_upstreams_wait(at_post):
    """Upstream's own tests put mocks into the tables, and their waits are counted: exactly one."""
    rig = Rig(at_post=at_post)
    mock = rig.post(MagicMock())
    rig.wait()
    mock.wait.assert_called_once_with()
    assert rig.table[0] is None


@pytest.fixture
def many(monkeypatch):
    """Return the number of polls after which a handle that may need wait() is left to it; a small one here."""
    assert _engine.UNCERTAIN_POLLS == 10_000
    monkeypatch.setattr(_engine, "UNCERTAIN_POLLS", 400)
    return 400


def test_a_work_that_only_completes_in_wait_is_not_polled_for_ever(many, log):
    """After many polls such a handle is left to upstream's wait, with one warning that says why."""
    rig = Rig(Settings(max_polls=100))
    rig.post(FakeWork(NEVER))
    for _ in range(many // 100):
        assert rig.engine.pending
        rig.engine.drive()
    assert rig.engine.drive() is True
    assert rig.counters.polls == many
    (said,) = log()
    assert "polls do not complete it, wait() may" in said
    rig.table[0].complete()
    rig.wait()
    assert rig.upstream_waits == [0]


def test_a_request_with_a_test_is_polled_as_long_as_it_takes(many):
    """A receiver that is very late is no reason to stop testing a request that can be tested."""
    rig = Rig(Settings(max_polls=1000))
    handle = rig.post(FakeRequest(10 * many))
    rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits) == (10 * many, 0, [])


# Handles that raise


@pytest.mark.parametrize("at_post", [0, 1])
@pytest.mark.parametrize("errors", [1, 1000], ids=["once", "always"])
def test_a_test_that_raises_leaves_the_slot_to_upstreams_wait(at_post, errors, log):
    """The error is counted and logged with its slot, also where the request would say complete afterwards."""
    rig = Rig(at_post=at_post)
    handle = rig.post(FakeRequest(error=SendFailedError("peer gone"), errors=errors), slot=2)
    rig.engine.drive()
    rig.engine.drive()
    assert (handle.tests, rig.counters.failed, rig.table[2]) == (1, 1, handle)
    assert rig.counters.posts == 1
    assert not rig.engine.pending
    (said,) = log()
    assert "send_handles[2]" in said
    assert "peer gone" in said


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


def test_while_closing_a_broken_send_is_logged_and_dropped(rig, log):
    """Cleanup goes on past a request that raises in test and in wait: one line at the end names its slot."""
    rig.post(FakeRequest(error=SendFailedError("peer gone")), slot=1)
    good = rig.post(FakeRequest(3), slot=2)
    rig.engine.close()
    for slot in range(4):
        rig.wait(slot)
    assert rig.table == [None] * 4
    assert good.tests == 3
    assert rig.clock.pauses == []
    dropped = [said for said in log() if "dropped" in said]
    assert len(dropped) == 1
    assert "send_handles[1]" in dropped[0]


def test_a_slot_whose_send_failed_can_be_used_again(rig):
    """Once upstream has dealt with a broken send, the next one in its slot is driven like any other."""
    rig.post(FakeRequest(error=SendFailedError()))
    rig.engine.drive()
    rig.table[0] = None
    handle = rig.post(FakeRequest(12))
    rig.wait()
    assert (handle.tests, handle.waits, rig.upstream_waits) == (12, 0, [])


# Posting


@pytest.mark.parametrize("at_post", [0, 1, 2, 5])
@pytest.mark.parametrize("after", [1, 2, 3, NEVER])
def test_a_post_is_tested_as_often_as_the_idle_wait_says(at_post, after):
    """Not once more, no longer than until it is complete, and what is not complete then is the driver's."""
    rig, woken = Rig(at_post=at_post), []
    rig.engine.wake_driver = lambda: woken.append(rig.engine.pending)
    handle = rig.post(FakeRequest(after))
    complete = after <= at_post
    assert handle.tests == min(at_post, after)
    assert (rig.table[0] is None, woken) == (complete, [] if complete else [True])
    assert (rig.counters.completions, rig.counters.drives, rig.engine.pending) == (complete, 0, not complete)


def test_a_post_that_is_complete_at_once_wakes_nobody():
    """An eager send costs the posting thread one test and nobody anything else, received or not."""
    rig, woken = Rig(at_post=10), []
    rig.engine.wake_driver = lambda: woken.append(True)
    handle = rig.post(FakeRequest(0))
    assert (handle.tests, woken, rig.table[0], rig.engine.pending) == (1, [], None, False)
    assert (rig.counters.posts, rig.counters.completions, rig.counters.drives) == (1, 1, 0)


@pytest.mark.parametrize(
    "handle",
    [FakeRequest(2), FakePlainRequest(2), FakeWork(2), [FakeRequest(2)]],
    ids=lambda handle: type(handle).__name__,
)
def test_a_post_that_is_pending_is_noted_before_the_driver_is_woken(handle):
    """Whatever its shape, a send that is not complete at once is known when the driver looks."""
    rig, seen = Rig(at_post=1), []
    rig.engine.wake_driver = lambda: seen.append(rig.engine.pending)
    rig.post(handle)
    assert seen == [True]
    assert rig.engine.drive() is True


# Waiting


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


def test_a_stalled_send_is_reported_once_a_period(log):
    """While a send is pending a warning names rank, table, slot, peer and age, as often as the setting says."""
    rig = Rig(Settings(max_polls=1, backoff_min_us=5e5, backoff_max_us=5e5, stall_warning_s=2))
    handle = rig.post(FakeRequest(NEVER), slot=3)
    rig.clock.on_pause = lambda: handle.complete() if len(rig.clock.pauses) == 13 else None
    rig.wait(3)
    assert log() == [
        f"rank {RANK}: the send in send_handles[3] to rank {PEER} is pending for {age}.0 s" for age in (2, 4, 6)
    ]
    assert rig.counters.stalls == 3


def test_a_send_that_is_driven_in_time_is_not_reported(log):
    """Below the period nothing is said."""
    rig = Rig(Settings(max_polls=1, backoff_min_us=5e5, backoff_max_us=5e5, stall_warning_s=2))
    rig.post(FakeRequest(4))
    rig.wait()
    assert (log(), rig.counters.stalls) == ([], 0)


def test_a_request_stays_tracked_until_its_own_test_says_complete(rig):
    """Nothing else counts as delivery: an idle engine keeps testing what is pending."""
    handle = rig.post(FakeRequest(NEVER))
    for _ in range(100):
        assert rig.engine.drive() is False
    assert (handle.tests, rig.engine.pending) == (100 * SETTINGS.max_polls, True)


# The end


def test_close_sets_one_deadline_for_everything(rig):
    """The deadline is set by the first call, and a later one does not move it."""
    deadline = rig.engine.close()
    rig.clock.now += 3
    assert rig.engine.close() == deadline == rig.clock() + 2


def test_a_closing_wait_ends_at_the_deadline_and_abandons(rig, log):
    """The whole cleanup costs at most the deadline, however many sends are pending, and says what was given up."""
    handles = [rig.post(FakeRequest(NEVER), slot) for slot in range(4)]
    rig.clock.now += 1
    start = rig.clock()
    rig.engine.close()
    for slot in range(4):
        rig.wait(slot)
    assert SETTINGS.drain_deadline_s <= rig.clock() - start < SETTINGS.drain_deadline_s + 0.05
    assert rig.table == [None] * 4
    assert [kept.handle for kept in rig.engine.abandoned] == handles
    assert [(kept.table, kept.slot, kept.rank, kept.peer) for kept in rig.engine.abandoned] == [
        ("send_handles", slot, RANK, PEER) for slot in range(4)
    ]
    assert all(round(kept.age_s, 2) == 6 for kept in rig.engine.abandoned)
    assert rig.upstream_waits == []
    said = [line for line in log() if "abandoned" in line]
    assert len(said) == 4
    assert said[1].startswith(f"rank {RANK}: abandoned the send in send_handles[1] to rank {PEER} after 6.0 s")


def test_an_abandoned_request_is_never_touched_again_and_lives_as_long_as_the_process():
    """It is neither cancelled nor freed nor tested, and not even the engine's death lets its buffer go."""
    rig = Rig()
    payload = type("Buffer", (), {})()
    alive = weakref.ref(payload)
    handle = rig.post(FakeRequest(NEVER, payload=payload))
    rig.engine.drain()
    touches = handle.touches
    rig.engine.drive()
    rig.engine.drain()
    rig.wait()
    assert handle.touches == touches
    del payload, handle, rig
    gc.collect()
    assert alive() is not None
    _table.ABANDONED.clear()
    gc.collect()
    assert alive() is None


def test_drain_waits_for_every_table_and_reports_counts_by_table(rig):
    """All tables are driven until clear; nothing is abandoned while the peer receives."""
    tables = [
        rig.table,
        *(rig.engine.table(name, [None] * 2) for name in ("send_schedule_handles", "send_expected_batch_num_handles")),
    ]
    for after, table in zip([25, 45, 65], tables, strict=True):
        table[1] = FakeRequest(after)
    assert rig.engine.drain() is True
    assert [entry["polls"] for entry in rig.engine.status()["tables"].values()] == [25, 45, 65]
    assert [entry["completions"] for entry in rig.engine.status()["tables"].values()] == [1, 1, 1]
    assert rig.engine.abandoned == []
    assert len(rig.clock.pauses) == 6


def test_drain_gives_up_in_every_table_at_the_deadline(rig):
    """What is still pending then, driven before or not, is abandoned; broken and unknown handles are upstream's."""
    other = rig.engine.table("send_schedule_handles", [None] * 3)
    rig.post(FakeRequest(NEVER), 1)
    other[0], other[1], other[2] = FakeRequest(NEVER), FakeMultiHandleWrapper([]), FakeRequest(error=SendFailedError())
    assert rig.engine.drain() is False
    assert sorted((kept.table, kept.slot) for kept in rig.engine.abandoned) == [
        ("send_handles", 1),
        ("send_schedule_handles", 0),
    ]
    assert other[0] is None
    assert not rig.engine.pending


def test_a_drain_without_time_still_tests_twice():
    """An MPI may complete a send in a test that says no: one no is not enough to give up, even with a budget of one."""
    rig = Rig(Settings(max_polls=1, drain_deadline_s=0))
    rig.post(FakeRequest(2))
    rig.engine.drain()
    assert (rig.engine.abandoned, rig.table[0], rig.counters.completions) == ([], None, 1)
    rig.post(FakeRequest(2))
    rig.wait()
    assert rig.engine.abandoned == []


def test_a_send_completing_at_the_last_moment_is_not_abandoned():
    """A send that fails or completes in the very last test is treated as that."""
    rig = Rig(Settings(max_polls=1, drain_deadline_s=0))
    rig.post(
        FakeRequest(NEVER, inside=lambda: rig.table[0].fail(SendFailedError()) if rig.table[0].tests == 2 else None)
    )
    rig.engine.close()
    rig.wait()
    assert (rig.engine.abandoned, rig.table[0], rig.upstream_waits) == ([], None, [0])


def test_a_drain_with_nothing_pending_is_immediate(rig):
    """An idle executor closes without a test or a pause."""
    assert rig.engine.drain() is True
    assert (rig.clock.pauses, rig.counters.drives) == ([], 0)


def test_a_send_posted_while_closing_is_driven_too(rig):
    """Late posts of the relay thread are waited for like the others, until the same deadline."""
    rig.engine.close()
    handle = rig.post(FakeRequest(15))
    assert rig.engine.drain() is True
    assert handle.tests == 15


# Retiring


@pytest.mark.parametrize("driven", [True, False])
def test_a_retired_engine_touches_nothing_any_more(rig, driven):
    """After retire() neither a drive nor a post tests a request, and a wait is upstream's own."""
    handle = rig.post(FakeRequest(NEVER))
    if driven:
        rig.engine.drive()
    tests = handle.tests
    rig.engine.retire()
    other = rig.post(FakeRequest(NEVER), 1)
    assert rig.engine.drive() is True
    assert rig.engine.drain() is True
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is False
    assert (handle.tests, other.tests, rig.table[:2], rig.engine.pending) == (tests, 0, [handle, other], False)
    handle.complete()
    rig.wait()
    assert (rig.upstream_waits, rig.table[0]) == ([0], None)


def test_a_retired_engine_leaves_plain_lists_alone_too(rig):
    """What it would have to be asked about is not tested either, nor is a post that met the retirement half-way."""
    handle, late = FakeRequest(NEVER), FakeRequest(NEVER)
    rig.engine.retire()
    assert rig.engine.progress_pp_send_handles([handle], 0) is False
    rig.table.sends.fresh.append((0, late, rig.clock()))
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is True
    assert rig.engine._drive(rig.table, rig.table.sends, 1) is None
    assert (handle.tests, late.tests, rig.engine.pending) == (0, 0, False)


def test_a_wait_in_progress_becomes_upstreams_when_the_engine_retires(rig):
    """A thread that is waiting goes on with upstream's wait instead of pausing for ever."""
    handle = rig.post(FakeRequest(NEVER))
    rig.clock.on_pause = lambda: (handle.complete(), rig.engine.retire())
    rig.wait()
    assert (rig.upstream_waits, rig.table[0], len(rig.clock.pauses)) == ([0], None, 1)


# Plain lists: executors that were constructed before the patch


def test_a_plain_list_is_driven_as_well(rig):
    """A list that reports nothing is looked at when it is asked about, and cleared in place."""
    plain = [None, FakeRequest(15)]
    assert rig.engine.progress_pp_send_handles(plain, 1) is False
    assert rig.engine.progress_pp_send_handles(plain, 1) is True
    assert plain == [None, None]
    assert type(plain) is list


def test_every_send_of_a_plain_list_is_found(rig):
    """A slot may be used again and again, after completion, failure, or upstream's own wait."""
    plain = [FakeRequest(error=SendFailedError())]
    with pytest.raises(SendFailedError):
        rig.engine.wait(plain, 0, lambda: plain[0].wait())
    plain[0] = handle = FakeRequest(25)
    rig.engine.wait(plain, 0, lambda: pytest.fail("upstream's wait"))
    assert (plain, handle.tests, handle.waits) == ([None], 25, 0)
    plain[0] = FakeMultiHandleWrapper([])
    rig.engine.wait(plain, 0, lambda: plain.__setitem__(0, None))
    plain[0] = FakeRequest(25)
    rig.engine.wait(plain, 0, lambda: pytest.fail("upstream's wait"))
    assert plain == [None]


def test_a_broken_send_of_a_plain_list_is_forgotten_with_the_next_one(rig, caplog):
    """Its buffer does not stay alive for longer than its slot is unused."""
    caplog.set_level(logging.CRITICAL, logger="trtllm_pp_progress")  # a kept record would keep the error's frames
    payload = type("Buffer", (), {})()
    alive = weakref.ref(payload)
    plain = [FakeRequest(error=SendFailedError(), payload=payload)]
    del payload
    rig.engine.progress_pp_send_handles(plain, 0)
    plain[0] = FakeRequest(1)
    assert rig.engine.progress_pp_send_handles(plain, 0) is True
    gc.collect()
    assert alive() is None


# Counters and memory


def test_counters_add_up(rig):
    """Posts are completions plus what is pending, left, displaced or abandoned; polls are tests."""
    handles = [rig.post(FakeRequest(after), slot) for slot, after in enumerate([1, 5, NEVER])]
    rig.post(FakeMultiHandleWrapper([]), 3)
    rig.engine.drive()
    rig.post(FakeRequest(1), 0)
    rig.post(broken := FakeRequest(error=SendFailedError()), 1)
    rig.engine.drive()
    handles += [broken]
    counters = rig.counters
    assert (counters.posts, counters.completions, counters.unknown, counters.failed) == (6, 3, 1, 1)
    assert counters.posts == counters.completions + counters.unknown + counters.failed + len(rig.table.sends.pending)
    assert counters.polls == sum(handle.tests for handle in handles) + 1


def test_parked_time_is_from_posted_to_seen_complete(rig):
    """Sum and maximum are in seconds of the clock."""
    for parked in (2, 5, 1):
        handle = rig.post(FakeRequest(NEVER))
        rig.engine.drive()
        rig.clock.now += parked
        handle.complete()
        rig.engine.drive()
    assert (rig.counters.parked_s, rig.counters.parked_max_s) == (8, 5)


def test_status_is_plain_data(rig):
    """It can be written as JSON, names every table, and lists what is pending and what was abandoned."""
    rig.engine.table("send_schedule_handles", [None])
    rig.post(FakeRequest(NEVER), 1)
    rig.engine.drain()
    rig.post(FakeRequest(NEVER), 2)
    rig.clock.now += 1
    status = json.loads(json.dumps(rig.engine.status()))
    assert set(status["tables"]) == {"send_handles", "send_schedule_handles"}
    assert [entry | {"age_s": round(entry["age_s"])} for entry in status["abandoned"]] == [
        {"table": "send_handles", "slot": 1, "rank": RANK, "peer": PEER, "age_s": 5}
    ]
    assert status["tables"]["send_handles"]["abandoned"] == 1


def test_status_lists_a_send_that_nobody_has_looked_at_yet(rig):
    """A send posted to a driver that is busy elsewhere is pending too, and its age counts."""
    rig.post(FakeRequest(NEVER), 2)
    rig.clock.now += 1
    assert rig.engine.status()["tables"]["send_handles"]["pending"] == [{"slot": 2, "age_s": 1.0}]


@pytest.mark.parametrize("at_post", [0, 1])
def test_ten_thousand_sends_leave_nothing_behind(at_post):
    """Request and buffer live until the send is complete and no longer: memory does not grow with use."""
    rig = Rig(slots=SLOTS, at_post=at_post)
    for number in range(10_000):
        payload = type("Buffer", (), {})() if number % 1000 == 0 else None
        rig.post(FakeRequest(number % 4, payload=payload), number % SLOTS)
        alive = weakref.ref(payload) if payload is not None else None
        del payload
        if alive is not None:
            assert (alive() is None) == (number % 4 <= at_post and at_post > 0)
        rig.engine.drive()
        if alive is not None:
            assert alive() is None
    sends = rig.table.sends
    assert (len(sends.fresh), len(sends.pending), len(sends.left), len(sends.displaced), len(rig.engine.abandoned)) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert rig.counters.completions == 10_000
    assert rig.table == [None] * SLOTS


@pytest.mark.parametrize("name", ["cancel", "Cancel", "Free"])
def test_the_fakes_notice_a_cancel_or_a_free(name):
    """Control: what must never happen to a send would be seen."""
    getattr(FakeRequest(), name)()
    assert fakes.FAULTS == ["cancel or free of a send"]
    fakes.FAULTS.clear()
