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
    FakeDriver,
    FakeMpiRequest,
    FakeMultiHandleWrapper,
    FakePart,
    FakeParts,
    FakePlainRequest,
    FakeRequest,
    FakeTester,
    FakeWork,
    SendFailedError,
    elsewhere,
)
from rig import PEER, RANK, SETTINGS, SLOTS, Rig

from trtllm_pp_progress.progress.sends import UNTESTED
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.settings.core import Settings


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
        wait_for_slot(rig.engine, rig.table, slot, lambda: None)


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


def test_a_drive_is_over_when_all_are_complete(rig):
    """The burst ends with the last completion, and the engine has nothing pending."""
    handles = [rig.post(FakeRequest(after), slot) for slot, after in enumerate([1, 3, 2])]
    assert rig.engine.pending()
    assert rig.engine.drive() is True
    assert not rig.engine.pending()
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


@pytest.mark.parametrize("by_relay", [False, True])
def test_a_list_is_complete_when_all_its_handles_are(by_relay):
    """A slot with several works is cleared once, when the last one is complete."""
    rig = Rig(by_relay=by_relay)
    works = [FakeWork(3), FakeWork(NEVER), FakeWork(1)]
    rig.post(works)
    assert rig.engine.drive() is False
    assert rig.table[0] is works
    works[1].complete()
    assert rig.engine.drive() is True
    assert rig.table[0] is None


@pytest.mark.parametrize("by_relay", [False, True])
def test_a_handle_without_a_test_is_left_to_upstreams_wait(by_relay, log):
    """The Ray path's wrapper is never polled; one warning says so for all its kind, and wait() is upstream's own."""
    rig = Rig(by_relay=by_relay)
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


@pytest.mark.parametrize("by_relay", [False, True])
def test_a_mock_is_left_to_upstreams_wait(by_relay):
    """Upstream's own tests put mocks into the tables, and their waits are counted: exactly one."""
    rig = Rig(by_relay=by_relay)
    mock = rig.post(MagicMock())
    rig.wait()
    mock.wait.assert_called_once_with()
    assert rig.table[0] is None


# Handles that raise


@pytest.mark.parametrize("by_relay", [False, True])
@pytest.mark.parametrize("errors", [1, 1000], ids=["once", "always"])
def test_a_test_that_raises_leaves_the_slot_to_upstreams_wait(by_relay, errors, log):
    """The error is counted and logged with its slot, also where the request would say complete afterwards."""
    rig = Rig(by_relay=by_relay)
    handle = rig.post(FakeRequest(error=SendFailedError("peer gone"), errors=errors), slot=2)
    rig.engine.drive()
    rig.engine.drive()
    assert (handle.tests, rig.counters.failed, rig.table[2]) == (1, 1, handle)
    assert rig.counters.posts == 1
    assert not rig.engine.pending()
    (said,) = log()
    assert "send_handles[2]" in said
    assert "peer gone" in said


# Posting


@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("after", [1, 2, 3, NEVER])
def test_what_the_relay_posts_is_driven_at_once(budget, after):
    """One budget, no longer than until it is complete, and what is not complete then is pending; it wakes nobody."""
    rig, woken = Rig(Settings(max_polls=budget), by_relay=True), []
    rig.engine.relay.wake = lambda: woken.append(rig.engine.pending())
    handle = rig.post(FakeRequest(after))
    complete = after <= budget
    assert handle.tests == min(budget, after)
    assert (rig.table[0] is None, woken) == (complete, [])
    assert (rig.counters.completions, rig.counters.drives, rig.engine.pending()) == (complete, 1, not complete)


@pytest.mark.parametrize(("native", "woken"), [(False, 1), (True, 0)])
@pytest.mark.parametrize("after", [0, 3, NEVER])
def test_what_another_thread_posts_is_left_to_whoever_drives(native, woken, after):
    """It costs the posting thread no test. A relay asleep is woken for it, unless a native thread would drive."""
    rig, told = Rig(driver=FakeDriver(native)), []
    rig.engine.relay.wake = lambda: told.append(rig.engine.pending())
    handle = rig.post(FakeRequest(after))
    assert (handle.tests, rig.table[0], rig.engine.pending()) == (0, handle, True)
    assert told == [True] * woken
    assert rig.counters.drives == 0


def urgent(**state):
    """Return a rig whose table is urgent, with a budget of 3 tests from C."""
    rig = Rig(Settings(max_polls=3), driver=FakeDriver(native=True, tester=FakeTester()))
    rig.table.sends.urgent = True
    for name, value in state.items():
        setattr(rig.table.sends, name, value)
    return rig


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("after", [2, NEVER])
def test_what_is_urgent_is_tested_by_whoever_posts_it(after, slow):
    """One budget, from C, unless tests are slow; the native driver has what is left."""
    rig = urgent(slow=slow)
    (part,) = rig.post(FakeParts([FakePart(after)]))
    complete = after == 2 and not slow
    assert part.tests == (0 if slow else min(after, 3))
    assert (rig.table[0] is None, rig.engine.pending()) == (complete, not complete)
    assert rig.driver.told == ["arm"] * (not complete)


def test_where_nobody_waits_for_what_is_urgent_the_next_posts_cost_no_test():
    """The pipeline is full; now and then it is asked again."""
    rig = urgent()
    posts = [rig.post(FakeParts([FakePart(NEVER)]), slot=turn % len(rig.table))[0] for turn in range(UNTESTED + 2)]
    assert [part.tests for part in posts[: UNTESTED + 1]] == [3] + [0] * (UNTESTED - 1) + [3]
    assert posts[-1].tests == 0


def test_what_is_urgent_is_left_to_the_relay_thread_where_tests_take_the_gil():
    """It is woken for it, as for any other post."""
    rig, told = Rig(), []
    rig.engine.relay.wake = lambda: told.append(rig.engine.pending())
    rig.table.sends.urgent = True
    assert (rig.post(FakeRequest(1)).tests, told) == (0, [True])


def test_a_relay_that_keeps_out_of_mpi_does_not_drive_what_it_posts():
    """At the process's end the thread that posts is not to be inside MPI while that is finalized."""
    rig = Rig(by_relay=True)
    rig.engine.relay.out = True
    handle = rig.post(FakeRequest(1))
    assert (handle.tests, rig.engine.pending()) == (0, True)


def test_a_post_that_is_complete_at_once_is_over_with_one_test():
    """An eager send costs the relay one test and nobody anything else, received or not."""
    rig = Rig(by_relay=True)
    handle = rig.post(FakeRequest(0))
    assert (handle.tests, rig.table[0], rig.engine.pending()) == (1, None, False)
    assert (rig.counters.posts, rig.counters.completions) == (1, 1)


SHAPES = [FakeRequest, FakePlainRequest, FakeWork, lambda after: [FakeRequest(after)]]


@pytest.mark.parametrize("shape", SHAPES, ids=["FakeRequest", "FakePlainRequest", "FakeWork", "list"])
@pytest.mark.parametrize("who", ["arm", "wake"])
def test_a_post_is_pending_before_anybody_is_told(shape, who):
    """Whatever its shape: a rest() of another thread between the two would leave the driver at rest."""
    rig, seen = Rig(), []
    setattr(rig.driver if who == "arm" else rig.engine.relay, who, lambda: seen.append(rig.engine.pending()))
    rig.post(shape(2))
    assert seen == [True]
    assert rig.engine.drive() is True


# Tracking


def test_a_request_stays_tracked_until_its_own_test_says_complete(rig):
    """Nothing else counts as delivery: an idle engine keeps testing what is pending."""
    handle = rig.post(FakeRequest(NEVER))
    for _ in range(100):
        assert rig.engine.drive() is False
    assert (handle.tests, rig.engine.pending()) == (100 * SETTINGS.max_polls, True)


# Closing


def test_close_sets_one_deadline_for_everything(rig):
    """Counted from the last call: a cleanup that comes long after the exit began has its whole time."""
    rig.engine.close()
    assert rig.engine.deadline == rig.clock() + SETTINGS.drain_deadline_s
    rig.clock.now += 3
    rig.engine.patience = 2
    rig.engine.close()
    assert rig.engine.deadline == rig.clock() + 2 * SETTINGS.drain_deadline_s


def test_another_life_has_no_deadline_until_it_is_closed_itself(rig):
    """What closed the first one does not bound the waits of the second."""
    rig.engine.close()
    rig.engine.reopen()
    handle = rig.post(FakeRequest(NEVER))
    rig.clock.on_pause = lambda: handle.complete() if rig.clock() > 1000 + 2 * SETTINGS.drain_deadline_s else None
    rig.wait()
    assert (rig.table[0], handle.seen, rig.engine.abandoned) == (None, True, [])
    rig.clock.now += 100
    rig.engine.close()
    assert rig.engine.deadline == rig.clock() + SETTINGS.drain_deadline_s


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
    assert rig.engine.progress_pp_send_handles(rig.table, 0) is False
    assert (handle.tests, other.tests, rig.table[:2], rig.engine.pending()) == (tests, 0, [handle, other], False)
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
    assert (handle.tests, late.tests, rig.engine.pending()) == (0, 0, False)


# Turned off for a while


def test_turned_off_nobody_drives_but_who_waits(rig):
    """Posts are left alone, by the relay too; a wait tests its own send, so that nothing is stuck."""
    rig.engine.relay.comes_by()
    rig.engine.turn(False)
    handle, parts = rig.post(FakeRequest(15)), rig.post(FakeParts([FakePart(1)]), 1)
    assert (handle.tests, parts[0].tests, rig.table[1], rig.engine.pending()) == (0, 0, parts, True)
    assert rig.driver.told == ["off"]
    rig.wait()
    assert (handle.tests, rig.table[0], rig.upstream_waits) == (15, None, [])


def test_turned_on_again_what_is_pending_is_driven(rig):
    """Whoever drives is told of it, and a relay asleep is woken."""
    woken = []
    rig.engine.relay.wake = lambda: woken.append(rig.engine.off)
    rig.engine.turn(False)
    rig.post(FakeRequest(3))
    assert woken == []
    rig.engine.turn(True)
    assert (rig.driver.told, woken) == (["off", "on", "arm"], [False])
    assert rig.engine.drive() is True
    late = rig.post(FakeParts([FakePart(1)]))
    assert (late[0].tests, rig.table[0]) == (1, None)


def test_turned_on_again_with_nothing_pending_nobody_is_woken(rig):
    """It costs nothing."""
    rig.engine.relay.wake = lambda: pytest.fail("nothing is pending")
    rig.engine.turn(False)
    rig.engine.turn(True)
    assert rig.driver.told == ["off", "on"]


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
        wait_for_slot(rig.engine, plain, 0, lambda: plain[0].wait())
    plain[0] = handle = FakeRequest(25)
    wait_for_slot(rig.engine, plain, 0, lambda: pytest.fail("upstream's wait"))
    assert (plain, handle.tests, handle.waits) == ([None], 25, 0)
    plain[0] = FakeMultiHandleWrapper([])
    wait_for_slot(rig.engine, plain, 0, lambda: plain.__setitem__(0, None))
    plain[0] = FakeRequest(25)
    wait_for_slot(rig.engine, plain, 0, lambda: pytest.fail("upstream's wait"))
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


def test_status_is_plain_data(rig, kept):
    """It can be written as JSON, names every table, and lists what is pending and what was abandoned."""
    rig.engine.table("send_schedule_handles", [None])
    rig.post(FakeRequest(NEVER), 1)
    rig.engine.close()
    rig.wait(1)
    rig.post(FakeRequest(NEVER), 2)
    rig.clock.now += 1
    status = json.loads(json.dumps(rig.engine.status()))
    assert set(status["tables"]) == {"send_handles", "send_schedule_handles"}
    assert [entry | {"age_s": round(entry["age_s"])} for entry in status["abandoned"]] == [
        {"table": "send_handles", "slot": 1, "rank": RANK, "peer": PEER, "age_s": 5}
    ]
    assert status["tables"]["send_handles"]["abandoned"] == 1
    assert status["number"] == rig.engine.number


def test_every_engine_has_a_number_of_its_own():
    """For the life of the process: that of one that is gone is not given again."""
    numbers = [Rig().engine.number for _ in range(3)]
    gc.collect()
    assert Rig().engine.number > numbers[2] > numbers[1] > numbers[0]


def test_status_lists_a_send_that_nobody_has_looked_at_yet(rig):
    """A send posted to a driver that is busy elsewhere is pending too, and its age counts."""
    rig.post(FakeRequest(NEVER), 2)
    rig.clock.now += 1
    assert rig.engine.status()["tables"]["send_handles"]["pending"] == [{"slot": 2, "age_s": 1.0}]


@pytest.mark.parametrize("by_relay", [False, True])
def test_ten_thousand_sends_leave_nothing_behind(by_relay, kept):
    """Request and buffer live until the send is complete and no longer: memory does not grow with use."""
    rig = Rig(slots=SLOTS, by_relay=by_relay)
    for number in range(10_000):
        payload = type("Buffer", (), {})() if number % 1000 == 0 else None
        rig.post(FakeRequest(number % 4, payload=payload), number % SLOTS)
        alive = weakref.ref(payload) if payload is not None else None
        del payload
        if alive is not None:
            assert (alive() is None) == by_relay
        rig.engine.drive()
        if alive is not None:
            assert alive() is None
    sends = rig.table.sends
    assert (len(sends.fresh), len(sends.pending), len(sends.left), kept, rig.engine.abandoned) == (0, 0, 0, [], [])
    assert rig.counters.completions == 10_000
    assert rig.table == [None] * SLOTS


@pytest.mark.parametrize("name", ["cancel", "Cancel", "Free"])
def test_the_fakes_notice_a_cancel_or_a_free(name):
    """Control: what must never happen to a send would be seen."""
    getattr(FakeRequest(), name)()
    assert fakes.FAULTS == ["cancel or free of a send"]
    fakes.FAULTS.clear()
