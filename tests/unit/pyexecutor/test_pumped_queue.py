"""Era H's queue: between upstream's ticks it drives, and its pump's variable and events mean what they meant."""

import queue
import threading
import time

import pytest
from doubles import executor_class
from doubles.pp_utils import get_with_mpi_progress
from fakes import LIMIT_S, NEVER, FakeDist, FakeDriver, FakeRequest, elsewhere, join, start

from trtllm_pp_progress.patching.patch import Patch
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.pyexecutor.grafts import Grafts
from trtllm_pp_progress.pyexecutor.pumped_queue import TICK_S, PumpedQueue
from trtllm_pp_progress.pyexecutor.shape import recognise
from trtllm_pp_progress.settings.core import PUMP_PERIOD, Settings

PERIOD_S = 0.005


class Rig:
    """An engine, its table, its queue and upstream's pump, which counts its ticks."""

    def __init__(self):
        self.driver = FakeDriver()
        self.engine = Engine(Settings(max_polls=10, drain_deadline_s=0), driver=self.driver)
        self.table = self.engine.table("send_handles", [None] * 4)
        self.stop, self.quiesced = threading.Event(), threading.Event()
        self.queue = PumpedQueue(self.engine, 4, self.stop.is_set)
        self.ticks, self.on_tick = 0, lambda: None

    def pump(self):
        """Tick as upstream's pump does."""
        if self.stop.is_set():
            self.quiesced.set()
        self.ticks += 1
        self.on_tick()
        return not self.stop.is_set()

    def get(self, progress=True, period=PERIOD_S):
        """Get as upstream's relay does."""
        return get_with_mpi_progress(self.queue, (self.pump, period) if progress else None, self.stop)


@pytest.fixture
def rig():
    """Return a rig."""
    return Rig()


def put_at_tick(rig, tick, item="batch"):
    """Put an item at one of upstream's ticks."""
    rig.on_tick = lambda: rig.queue.put(item) if rig.ticks == tick else None


def test_upstream_s_ticks_stay(rig):
    """With nothing pending the relay ticks as often as it did."""
    put_at_tick(rig, 3)
    assert rig.get() == "batch"
    assert rig.ticks == 3


def test_a_tick_comes_no_sooner_than_asked_for():
    """The shortest period is for where upstream's is a default; a longer one than that is kept."""
    engine = Engine(Settings())
    for shortest, timeout, at_least in ((0.02, 0.001, 0.02), (0.001, 0.02, 0.02), (0.0, 0.005, 0.005)):
        started = time.monotonic()
        with pytest.raises(queue.Empty):
            PumpedQueue(engine, 4, lambda: False, shortest).get(timeout=timeout)
        assert time.monotonic() - started >= at_least


@pytest.mark.parametrize("named", [True, False])
def test_a_period_that_the_environment_names_is_kept(named, monkeypatch):
    """Upstream's default of 5 ms is not; its exit hook waits for 0.1 s at least, and no longer need be."""
    monkeypatch.delenv(PUMP_PERIOD, raising=False)
    if named:
        monkeypatch.setenv(PUMP_PERIOD, "2")
    cls = executor_class("H")
    Patch(Grafts(cls, recognise(cls), Settings(mode="poll")).all())
    executor = cls(FakeDist(lambda: FakeRequest(0)))
    executor.executed_batch_queue = queue.Queue()
    assert type(executor.executed_batch_queue) is PumpedQueue
    assert executor.executed_batch_queue._shortest == (0.0 if named else TICK_S)
    assert TICK_S < 0.1


def test_between_ticks_a_pending_send_is_driven(rig):
    """Again and again, not once a tick."""
    rig.table[0] = handle = FakeRequest(NEVER)
    put_at_tick(rig, 3)
    rig.get()
    assert handle.tests > 3 * rig.engine.settings.max_polls


def test_a_post_wakes_the_relay_between_ticks(rig):
    """The executor thread's send does not wait for the next tick."""
    relay = start(lambda: rig.get(period=LIMIT_S))
    while not rig.queue.not_empty._waiters:
        pass
    done = threading.Event()

    def inside():
        if handle.tests == 400:
            done.set()

    handle = FakeRequest(400, inside=inside)
    rig.table[0] = handle
    assert done.wait(LIMIT_S)
    rig.queue.put("batch")
    join(relay)
    assert rig.ticks == 0


def test_an_item_that_is_there_is_handed_out_at_once(rig):
    """Also where no time is left."""
    rig.queue.put("batch")
    assert rig.queue.get(timeout=0) == "batch"


def test_the_end_of_the_time_is_an_empty_queue(rig):
    """As queue.Queue says it."""
    rig.table[0] = FakeRequest(NEVER)
    for timeout in (0, 0.001):
        with pytest.raises(queue.Empty):
            rig.queue.get(timeout=timeout)
    with pytest.raises(queue.Empty):
        rig.queue.get(block=False)


def test_a_stop_ends_the_drive(rig):
    """Set by shutdown, by upstream's exit hook or by a pump that failed: after the next tick no send is tested."""
    rig.table[0] = handle = FakeRequest(NEVER)
    tests = []

    def on_tick():
        if rig.ticks == 2:
            rig.stop.set()
        elif rig.quiesced.is_set():
            tests.append(handle.tests)
            if len(tests) == 3:
                rig.queue.put("batch")

    rig.on_tick = on_tick
    assert rig.get() == "batch"
    assert len(set(tests)) == 1


def test_without_a_pump_the_relay_thread_keeps_out_of_mpi(rig):
    """TLLM_PP_MPI_PROGRESS_POLL_MS at most 0: a plain get, and no test of what is pending."""
    rig.table[0] = handle = FakeRequest(NEVER)
    tests = handle.tests
    rig.queue.put("batch")
    assert rig.get(progress=False) == "batch"
    relay = start(lambda: rig.get(progress=False))
    while not rig.queue.not_empty._waiters:
        pass
    rig.queue.put("batch")
    join(relay)
    assert handle.tests == tests


@pytest.mark.parametrize("how", ["running", "stopped", "off"])
def test_at_its_end_the_relay_lets_its_sends_go(rig, how, kept):
    """None is handed out at once, whatever became of the pump, and what is pending is the keeper's."""
    rig.table[0] = handle = FakeRequest(NEVER)
    if how == "stopped":
        rig.stop.set()
    rig.queue.put(None)
    assert elsewhere(lambda: rig.get(progress=how != "off")) is None
    assert [record.handle for record in kept] == [handle]
    assert (handle.tests, rig.engine.pending(), rig.engine.abandoned) == (0, False, [])


@pytest.mark.parametrize("how", ["off", "stopped", "running"])
def test_where_the_relay_keeps_out_of_mpi_so_does_the_driver(rig, how):
    """It is stopped for good before the relay idles, and only then."""
    if how == "stopped":
        rig.stop.set()
    rig.queue.put("batch")
    assert rig.get(progress=how != "off") == "batch"
    assert ("stop" in rig.driver.told) == (how != "running")
