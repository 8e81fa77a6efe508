"""What the engine knows of the relay thread: which it is, and whether it sleeps."""

import threading

from fakes import LIMIT_S, elsewhere, join, start

from trtllm_pp_progress.progress.relay import RelayThread


def test_nobody_is_the_relay_before_it_came_by():
    """Then that thread is, and no other."""
    relay = RelayThread()
    assert not relay.is_current()
    elsewhere(relay.comes_by)
    assert not relay.is_current()
    relay.comes_by()
    assert relay.is_current()
    assert not elsewhere(relay.is_current)


def test_a_relay_that_is_awake_is_not_woken():
    """Nobody takes its lock for nothing; one asleep without a condition of ours cannot be."""
    relay, condition = RelayThread(), threading.Condition()
    with condition:
        elsewhere(relay.wake)
        relay.falls_asleep(condition)
        relay.wakes()
        elsewhere(relay.wake)
        relay.falls_asleep(condition)
        relay.comes_by()
        elsewhere(relay.wake)


def test_a_relay_that_sleeps_is_woken():
    """By whoever posts."""
    relay, condition, asleep = RelayThread(), threading.Condition(), threading.Event()

    def sleep():
        with condition:
            relay.falls_asleep(condition)
            asleep.set()
            assert condition.wait(LIMIT_S)
            relay.wakes()

    thread = start(sleep)
    assert asleep.wait(LIMIT_S)
    relay.wake()
    join(thread)
