"""A burst: bounded by a budget and in time, fair to every send, and it knows when polling is not worth it."""

import logging

import pytest
from fakes import (
    NEVER,
    FakeDriver,
    FakePart,
    FakeParts,
    FakeRequest,
    FakeTester,
    FakeWork,
    SendFailedError,
)
from rig import PEER, RANK, SETTINGS, SLOTS, Rig

from trtllm_pp_progress.progress import burst as _burst
from trtllm_pp_progress.progress.burst import DRIVE_S, MOVING_S, SLOW_TEST_S, SLOW_TESTS
from trtllm_pp_progress.settings.core import Settings


@pytest.fixture
def log(caplog):
    """Return a function that lists what was logged so far."""
    caplog.set_level(logging.DEBUG, logger="trtllm_pp_progress")
    return lambda: [record.getMessage() for record in caplog.records]


# The budget


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


def test_with_more_pending_than_the_budget_every_send_gets_its_turn():
    """The one that waited longest comes first: none is passed over for those posted before it."""
    rig = Rig(slots=SLOTS)
    handles = [rig.post(FakeRequest(NEVER), slot) for slot in range(25)]
    for drive in range(1, 11):
        rig.engine.drive()
        tests = [handle.tests for handle in handles]
        assert sum(tests) == drive * SETTINGS.max_polls
        assert max(tests) - min(tests) <= 1


# Time


def slow(rig, seconds, after=NEVER):
    """Return a send whose tests take so long."""
    return FakeRequest(after, inside=lambda: rig.clock.pause(seconds))


def test_a_slow_test_ends_the_drive():
    """A test of 50 ms is the drive's last: whoever drives has a batch to look for."""
    rig = Rig()
    handle = rig.post(slow(rig, 0.05))
    assert rig.engine.drive() is False
    assert (handle.tests, rig.counters.exhausted, rig.table[0]) == (1, 1, handle)


def test_quick_tests_add_up_to_the_same_end():
    """However large the budget, a drive takes no longer than its time and one test."""
    rig = Rig(Settings(max_polls=100_000))
    handle = rig.post(slow(rig, DRIVE_S / 10))
    rig.engine.drive()
    assert 10 <= handle.tests <= 11


def test_a_drive_that_ends_in_time_goes_on_where_it_ended():
    """With slow tests, too, every send gets its turn."""
    rig = Rig()
    handles = [rig.post(slow(rig, SLOW_TEST_S / 2), slot) for slot in range(4)]
    for _ in range(8):
        rig.engine.drive()
    assert [handle.tests for handle in handles] == [2, 2, 2, 2]


def test_a_kind_of_handle_that_is_slow_again_and_again_is_not_polled_any_more(log):
    """It is upstream's then, with one warning for its table; each further one of its kind is tested once to see."""
    rig = Rig()
    first = rig.post(slow(rig, 0.05))
    for tests in range(1, SLOW_TESTS + 1):
        assert rig.engine.pending()
        rig.engine.drive()
        assert first.tests == tests
    assert not rig.engine.pending()
    rig.engine.drive()
    assert (first.tests, rig.table[0], rig.counters.unknown) == (SLOW_TESTS, first, 1)
    second, third = rig.post(slow(rig, 0.05), 1), rig.post(slow(rig, 0.05), 2)
    for _ in range(5):
        rig.engine.drive()
    assert (second.tests, third.tests, rig.engine.pending()) == (1, 1, False)
    (said,) = log()
    assert f"rank {RANK}" in said
    assert "a test of a FakeRequest takes 0.050 s again and again" in said
    for slot, handle in enumerate([first, second, third]):
        handle.complete()
        rig.wait(slot)
    assert rig.upstream_waits == [0, 1, 2]


def test_such_handles_are_not_tested_as_they_are_written_either():
    """Upstream's executor thread would wait for that test in the middle of a step."""
    rig = Rig()
    rig.post(FakeParts([FakePart(NEVER, inside=lambda: rig.clock.pause(0.05))]))
    for _ in range(SLOW_TESTS):
        rig.engine.drive()
    assert rig.sends.slow
    late = rig.post(FakeParts([FakePart(NEVER)]), 1)
    assert late[0].tests == 0


@pytest.mark.parametrize("quick", ["the same send", "another of its kind"])
def test_single_slow_tests_change_nothing(quick, log):
    """A thread that holds the GIL makes any test slow, but not all of them in a row."""
    rig, spent = Rig(), []

    def inside():
        spent.append(0.05 if len(spent) % SLOW_TESTS else 0.0)
        rig.clock.pause(spent[-1])

    handle = rig.post(FakeRequest(NEVER, inside=inside))
    if quick != "the same send":
        handle.inside = lambda: rig.clock.pause(0.05)
        rig.post(FakeRequest(NEVER), 1)
    for _ in range(10 * SLOW_TESTS):
        rig.engine.drive()
    assert (rig.engine.pending(), rig.counters.unknown) == (True, 0)
    assert handle.tests > SLOW_TESTS
    assert [said for said in log() if "pending for" not in said] == []


# Tests without the GIL


def native_rig(**options):
    """Return a rig whose pkl5 requests are tested from C, and its tester."""
    tester = FakeTester(**options)
    return Rig(driver=FakeDriver(native=True, tester=tester)), tester


def test_one_call_makes_many_tests():
    """As many as the budget has for one send; the test at the post is the table's own."""
    rig, tester = native_rig()
    parts = rig.post(FakeParts([FakePart(NEVER)]))
    assert rig.engine.drive() is False
    assert (len(tester.made[0].stops), parts[0].tests) == (1, 1 + SETTINGS.max_polls)
    assert rig.counters.polls == SETTINGS.max_polls
    parts[0].complete()
    assert rig.engine.drive() is True
    assert rig.table[0] is None


def test_sends_tested_from_c_share_the_budget():
    """Each gets its part of it in a call; what one has left over is the others'."""
    rig, _ = native_rig()
    sends = [rig.post(FakeParts([FakePart(NEVER)]), slot) for slot in range(4)]
    rig.engine.drive()
    tests = [parts[0].tests - 1 for parts in sends]
    assert sum(tests) == SETTINGS.max_polls
    assert max(tests) - min(tests) <= 1


@pytest.mark.parametrize(("stop", "limit_s"), [(None, DRIVE_S), (1234, MOVING_S)])
def test_only_what_a_batch_can_end_may_take_long(stop, limit_s):
    """32 MB move for 50 ms: a burst each millisecond costs a tenth of that."""
    rig, tester = native_rig()
    rig.post(FakeParts([FakePart(NEVER)]))
    rig.engine.drive(stop=stop)
    assert tester.made[0].limits_s == [limit_s]


def test_a_call_that_ends_early_is_made_again_within_the_budget():
    """Its number of tests is what counts."""
    rig, tester = native_rig(tests_a_call=3)
    parts = rig.post(FakeParts([FakePart(NEVER)]))
    rig.engine.drive(stop=77)
    assert (tester.made[0].stops, parts[0].tests) == ([77] * 4, 1 + SETTINGS.max_polls)


def test_what_such_a_test_raises_is_upstreams_to_meet():
    """As with any other test: once, counted, and the slot stays."""
    rig, _ = native_rig()
    parts = rig.post(FakeParts([FakePart(NEVER)]))
    parts[0].fail(SendFailedError("peer gone"))
    rig.engine.drive()
    rig.engine.drive()
    assert (parts[0].tests, rig.counters.failed, rig.table[0]) == (2, 1, parts)


def test_whether_data_moved_is_known_until_the_next_drive():
    """The relay drives again at once while it does."""
    rig, tester = native_rig()
    rig.post(FakeParts([FakePart(NEVER)]))
    rig.engine.drive()
    assert rig.engine.burst.moved is False
    tester.made[0].moved = True
    rig.engine.drive()
    assert rig.engine.burst.moved is True
    tester.made[0].moved = False
    rig.engine.drive()
    assert rig.engine.burst.moved is False


# Handles that are not worth polling


@pytest.fixture
def many(monkeypatch):
    """Return the number of polls after which a handle that may need wait() is left to it; a small one here."""
    assert _burst.UNCERTAIN_POLLS == 10_000
    monkeypatch.setattr(_burst, "UNCERTAIN_POLLS", 400)
    return 400


def test_a_work_that_only_completes_in_wait_is_not_polled_for_ever(many, log):
    """After many polls such a handle is left to upstream's wait, with one warning that says why."""
    rig = Rig(Settings(max_polls=100))
    rig.post(FakeWork(NEVER))
    for _ in range(many // 100):
        assert rig.engine.pending()
        rig.engine.drive()
    assert rig.counters.polls == many
    assert rig.engine.drive() is True
    assert rig.counters.polls == many + 1
    (said,) = log()
    assert "polls do not complete it, wait() may" in said
    rig.table[0].complete()
    rig.wait()
    assert rig.upstream_waits == [0]


# What is said of a send that is pending for long


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
