"""The wait loop and its pauses: short at first, longer for a receiver that stays away, and never past its end."""

import itertools
import math
import threading

import pytest
from fakes import LIMIT_S, SendFailedError

from trtllm_pp_progress.progress.waits import LONGEST_PAUSE_S, bounded, pauses, wait_until
from trtllm_pp_progress.settings.core import Settings

SETTINGS = Settings(backoff_min_us=50, backoff_max_us=500)


def test_pauses_double_from_the_shortest_to_the_longest(clock):
    """As the settings say."""
    found = [round(pause * 1e6) for pause in itertools.islice(pauses(SETTINGS, clock), 6)]
    assert found == [50, 100, 200, 400, 500, 500]


def test_a_receiver_that_stays_away_is_looked_for_less_often(clock):
    """No pause adds more than 2 % to the time waited, beyond what is set, and none is longer than 20 ms."""
    found, waited = [], 0.0
    for pause in itertools.islice(pauses(SETTINGS, clock), 3000):
        longest = max(SETTINGS.backoff_max_us * 1e-6, min(0.02 * waited, LONGEST_PAUSE_S))
        assert pause <= longest
        found.append(pause)
        clock.pause(pause)
        waited += pause
    assert found[-1] == LONGEST_PAUSE_S == 0.02
    assert found == sorted(found)


def test_a_longer_pause_that_was_set_is_kept(clock):
    """Twenty milliseconds bound what grows, not what an operator asks for."""
    settings = Settings(backoff_min_us=1000, backoff_max_us=100_000)
    for pause in itertools.islice(pauses(settings, clock), 20):
        clock.pause(pause)
    assert pause == pytest.approx(0.1)


def test_at_first_there_is_none_where_that_is_asked_for(clock):
    """Where a test takes no GIL, a wait looks without a pause for a while."""
    found = pauses(SETTINGS, clock, at_once_s=0.0095)
    for _ in range(10):
        assert next(found) == 0.0
        clock.now += 0.001
    assert [round(next(found) * 1e6) for _ in range(3)] == [50, 100, 200]


def test_a_wait_ends_as_soon_as_it_is_done(clock):
    """Without a pause after the last look."""
    looks = iter([False, False, True])
    assert wait_until(lambda: next(looks), pauses(SETTINGS, clock), clock.pause, clock)
    assert len(clock.pauses) == 2


def test_a_wait_ends_at_its_end(clock):
    """False; it looks before it gives up, and asks for the end each time, which may come closer."""
    ends = [clock() + 1]
    clock.on_pause = lambda: ends.__setitem__(0, clock())
    looks = []
    assert not wait_until(lambda: looks.append(1), pauses(SETTINGS, clock), clock.pause, clock, lambda: ends[0])
    assert (len(looks), len(clock.pauses)) == (2, 1)


def test_a_wait_whose_end_has_passed_looks_once(clock):
    """What is complete by then is seen complete."""
    assert wait_until(lambda: True, pauses(SETTINGS, clock), clock.pause, clock, lambda: -math.inf)
    assert not wait_until(lambda: False, pauses(SETTINGS, clock), clock.pause, clock, lambda: -math.inf)
    assert clock.pauses == []


def test_a_bounded_wait_tells_whether_it_is_over():
    """One that is not goes on in a thread that nothing waits for."""
    assert bounded(lambda: None, LIMIT_S) is True
    inside, leave = threading.Event(), threading.Event()
    assert bounded(lambda: (inside.set(), leave.wait(LIMIT_S)), 0.0) is False
    assert inside.wait(LIMIT_S)
    left = [thread for thread in threading.enumerate() if thread.name == "pp-upstreams-wait"]
    assert [thread.daemon for thread in left] == [True]
    leave.set()
    left[0].join(LIMIT_S)


@pytest.mark.parametrize("error", [SendFailedError("gone"), KeyboardInterrupt()])
def test_what_a_bounded_wait_raises_is_raised(error):
    """In the thread that waits for it."""

    def fail():
        raise error

    with pytest.raises(type(error)) as raised:
        bounded(fail, LIMIT_S)
    assert raised.value is error


def test_where_no_thread_can_be_started_a_wait_has_its_own_end(monkeypatch):
    """Python 3.12 refuses new threads at the interpreter's end: what upstream would wait for is waited for."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    waited = []
    assert bounded(lambda: waited.append(True), 0.0) is True
    assert waited == [True]
