"""What the door answers for this patch: the status, and driving turned off for a lease and on again."""

import pytest
from fakes import PATCHABLE, FakeDist, executor_class

import trtllm_pp_progress as package
from trtllm_pp_progress.installation import orders
from trtllm_pp_progress.installation.orders import answer, turn
from trtllm_pp_progress.installation.records import engines
from trtllm_pp_progress.settings.schema import SettingsError


class Timer:
    """A timer that the tests let go off."""

    def __init__(self, seconds, function, arguments):
        self.seconds, self.goes_off, self.cancelled = seconds, lambda: function(*arguments), False

    def start(self):
        """Wait for the tests."""

    def cancel(self):
        """Note it."""
        self.cancelled = True


@pytest.fixture
def timers(monkeypatch):
    """Replace timers, and return those that were made."""
    made = []
    monkeypatch.setattr(orders.threading, "Timer", lambda *given: made.append(Timer(*given)) or made[-1])
    yield made
    orders._leases.clear()


def living(era, executors=1):
    """Return executors of a patched class."""
    cls = executor_class(era)
    package.install(cls, mode="poll")
    found = [cls(FakeDist()) for _ in range(executors)]
    for executor in found:
        executor.start_worker()
    return found


def test_asked_for_nothing_it_is_the_status():
    """And for `status`, too."""
    assert answer({}) == answer({"order": "status"}) == package.status()


@pytest.mark.parametrize("order", ["stop", "", None, 1, "OFF"])
def test_an_order_that_is_none_is_refused_and_named(order):
    """With the valid ones."""
    with pytest.raises(ValueError, match=r"order .* is not valid: one of status, off, on"):
        answer({"order": order})


@pytest.mark.parametrize("era", PATCHABLE)
def test_driving_is_turned_off_for_a_lease(era, timers):
    """Of every executor; then it is on again, whatever became of who asked."""
    executors = living(era, 2)
    assert answer({"order": "off", "lease_s": 5}) == {"turned": 2, "refused": []}
    assert [engine.off for engine in engines()] == [True, True]
    ((timer,),) = (timers,)
    assert (timer.seconds, timer.daemon) == (5, True)
    timer.goes_off()
    assert [engine.off for engine in engines()] == [False, False]
    for executor in executors:
        executor.shutdown()


def test_turned_on_before_the_lease_is_over_nothing_is_left(timers):
    """The lease is cancelled, and so is that of an order that came again."""
    (executor,) = living("E2")
    answer({"order": "off"})
    answer({"order": "off", "lease_s": 600})
    assert [timer.cancelled for timer in timers] == [True, False]
    assert answer({"order": "on"}) == {"turned": 1, "refused": []}
    assert [timer.cancelled for timer in timers] == [True, True]
    assert not engines()[0].off
    executor.shutdown()


@pytest.mark.parametrize("lease", [0, -1, 601, "x", None, float("nan"), True])
def test_a_senseless_lease_is_refused(lease, timers):
    """Nothing is turned off for it."""
    (executor,) = living("E2")
    with pytest.raises(SettingsError, match=r"a number from 0.1 to 600"):
        answer({"order": "off", "lease_s": lease})
    assert not engines()[0].off
    executor.shutdown()


def test_where_the_executor_thread_relays_it_is_refused(timers, monkeypatch):
    """A drain before a forward relies on sends being driven; turning on is never refused."""
    import doubles

    monkeypatch.delenv("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", raising=False)
    cls = doubles.executor_class("G")
    package.install(cls, mode="poll")
    executor = cls(FakeDist())
    found = answer({"order": "off"})
    assert found["turned"] == 0
    assert found["refused"] == ["era G, partial: a drain relies on sends being driven"]
    assert timers == []
    assert turn(True, 0.0) == {"turned": 1, "refused": []}
    assert executor.pp_async_broadcast_sample_state is False


def test_with_nobody_there_nothing_is_turned(timers):
    """No lease is needed for that."""
    assert answer({"order": "off"}) == {"turned": 0, "refused": []}
    assert timers == []
