"""The driver of an executor: what each mode starts, when it is armed and at rest, and what is counted without one."""

import queue
from types import SimpleNamespace

import pytest
from fakes import NEVER, FakeDist, FakeNative, FakeRequest, FakeWait, elsewhere, executor_class

from trtllm_pp_progress.driver import choose as _choose
from trtllm_pp_progress.driver.choose import LATE_S, Driver
from trtllm_pp_progress.driver.library import DriverUnavailableError
from trtllm_pp_progress.driver.native import CROWDED_SILENCE_S, SILENCE_S
from trtllm_pp_progress.patching.patch import Patch
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.pyexecutor.grafts import Grafts
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue
from trtllm_pp_progress.pyexecutor.shape import recognise
from trtllm_pp_progress.settings.core import Settings


@pytest.fixture
def natives(monkeypatch):
    """Replace the native thread and its tests by fakes; return the list of threads that were started."""
    started = []

    def start(silence_s, lingers):
        started.append(FakeNative(silence_s))
        started[-1].lingers = lingers
        return started[-1]

    monkeypatch.setattr(_choose, "NativeDriver", start)
    monkeypatch.setattr(_choose, "NativeTester", lambda yields: SimpleNamespace(yields=yields, takes=lambda _: False))
    return started


def started(natives, mode="native", crowded=False):
    """Return a driver that was started."""
    driver = Driver(mode)
    driver.start(crowded)
    return driver


def fail_with(monkeypatch, error):
    """Have no native thread start."""

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(_choose, "NativeDriver", fail)


# What starts


@pytest.mark.parametrize(("mode", "reason"), [("auto", "it is built"), ("native", "selected")])
@pytest.mark.parametrize(("crowded", "silence_s"), [(False, SILENCE_S), (True, CROWDED_SILENCE_S)])
def test_a_mode_starts_its_driver(natives, mode, reason, crowded, silence_s):
    """With what suits the machine; status says which runs, and why."""
    driver = Driver(mode)
    assert (driver.native, driver.tester, driver.may_spin, driver.status()["runs"]) == (False, None, False, "poll")
    driver.start(crowded)
    assert [(native.silence_s, native.lingers) for native in natives] == [(silence_s, not crowded)]
    assert driver.native
    assert driver.tester.yields is crowded
    assert driver.may_spin is not crowded
    assert driver.status() == {
        "runs": "native",
        "reason": reason,
        "state": "idle",
        "ticks": 0,
        "silences": 0,
        "longest_silence_s": 0.0,
    }


@pytest.mark.parametrize("mode", ["auto", "native"])
def test_a_driver_that_cannot_run_leaves_the_polling_one(monkeypatch, mode):
    """Serving starts all the same, and status says what is missing."""
    fail_with(monkeypatch, DriverUnavailableError("no compiler when this was installed"))
    driver = started(None, mode)
    status = driver.status()
    assert (status["runs"], status["reason"]) == ("poll", "no compiler when this was installed")
    assert (driver.native, driver.tester) == (False, None)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError("MPI_ERR_INTERN")])
def test_a_driver_that_fails_in_another_way_does_not_stop_serving(monkeypatch, error):
    """start_worker() must not raise for it."""
    fail_with(monkeypatch, error)
    status = started(None, "auto").status()
    assert (status["runs"], status["reason"]) == ("poll", f"native does not start: {error!r}")


def test_poll_starts_nothing(natives):
    """Selected is selected."""
    driver = started(natives, "poll")
    status = driver.status()
    assert (status["runs"], status["reason"], status["state"]) == ("poll", "selected", "none")
    assert (natives, driver.native, driver.tester) == ([], False, None)


def test_one_that_runs_is_not_started_again_and_one_that_is_gone_is(natives):
    """An executor may have another life; a thread that has failed counts as none."""
    driver = started(natives)
    driver.start(crowded=False)
    assert len(natives) == 1
    driver.stop()
    assert not driver.native
    driver.start(crowded=False)
    assert (len(natives), driver.native) == (2, True)
    natives[-1].runs = False
    assert not driver.native
    driver.start(crowded=False)
    assert (len(natives), driver.native) == (3, True)


def test_without_a_native_driver_every_call_is_one_in_vain():
    """They are made on upstream's critical path, whatever the mode."""
    driver = Driver()
    driver.arm()
    driver.arm(planned_s=1.0)
    driver.rest(lambda: pytest.fail("asked in vain"))
    driver.stop()
    assert driver.status()["state"] == "none"


# Armed and at rest


def test_a_planned_pause_is_announced(natives):
    """Silence begins at its end."""
    driver, told = started(natives), []
    natives[0].driven = told.append
    driver.arm()
    driver.arm(0.25)
    assert told == [0.0, 0.25]


def test_a_post_while_rest_is_at_it_is_not_overlooked(natives):
    """What is posted between the question and idle(), and armed before it, is asked for again and armed again."""
    driver = started(natives)
    (native,) = natives
    driver.arm()
    driver.rest(lambda: True)
    posted = []
    native.idle = lambda: (posted.append("send"), driver.arm(), native.told.append("idle"))
    driver.rest(lambda: bool(posted))
    assert native.told == ["driven", "driven", "idle", "driven"]


def test_one_that_is_at_rest_is_left_alone(natives):
    """A relay that is about to sleep has the GIL, and others want it."""
    started(natives).rest(lambda: pytest.fail("asked in vain"))
    assert natives[0].told == []


def test_a_relay_in_a_receive_rests_only_with_nothing_pending(natives):
    """It drives from there, so the thread gets more patience instead."""
    driver = started(natives)
    driver.arm()
    driver.rest(lambda: True, receiving=True)
    driver.rest(lambda: False, receiving=True)
    assert natives[0].told == ["driven", "receiving", "idle"]


def rig(clock, natives, *script):
    """Return an engine with a started driver, its queue on a scripted wait, and a table."""
    settings = Settings(max_polls=2, backoff_min_us=100)
    driver = started(natives)
    driver.tester = None  # with it a relay spins at first, which this clock does not get past
    engine = Engine(settings, driver=driver, clock=clock, pause=clock.pause)
    relay = RelayQueue(engine, wait=FakeWait(clock, *script))
    return engine, relay, engine.table("send_handles", [None] * 4)


def test_the_relay_arms_it_while_it_drives_and_rests_it_before_it_sleeps(clock, natives):
    """Armed by tests in vain and at every pause; at rest when the relay sleeps, or leaves, with nothing pending."""
    _, relay, table = rig(clock, natives, None, None, lambda: relay.put("batch"))
    table[0] = FakeRequest(6)
    (native,) = natives
    assert native.told == ["driven"]
    assert relay.get() == "batch"
    burst, pause = ["driven"] * 2, ["driven"]
    assert native.told == ["driven", *burst, *pause, *burst, *pause, "driven", "idle"]


def test_a_burst_at_the_post_arms_it_at_every_test(clock, natives):
    """A burst may last longer than the silence: the relay is at work all the while."""
    engine, _, table = rig(clock, natives)
    engine.relay.comes_by()
    table[0] = FakeRequest(NEVER)
    assert natives[0].told == ["driven"] * 3


@pytest.mark.parametrize("runs", [True, False])
def test_a_post_arms_it_and_wakes_the_relay_only_where_it_does_not_run(clock, natives, monkeypatch, runs):
    """The sleeping relay needs the GIL to wake up, the native driver does not."""
    engine, _, table = rig(clock, natives)
    (native,) = natives
    native.runs = runs
    monkeypatch.setattr(engine.relay, "wake", lambda: native.told.append("wake"))
    elsewhere(lambda: table.__setitem__(0, FakeRequest(NEVER)))
    assert native.told == (["driven"] if runs else ["driven", "wake"])


def test_a_post_beside_a_sleeping_relay_keeps_it_armed(clock, natives):
    """Armed by the post, and in a receive once there is a batch."""
    _, relay, _ = rig(
        clock,
        natives,
        lambda: elsewhere(lambda: relay._engine.tables["send_handles"].__setitem__(0, FakeRequest(NEVER))),
        lambda: relay.put("batch"),
    )
    assert relay.get() == "batch"
    told = natives[0].told
    assert {*told[:-1]} == {"driven"}
    assert told[-1] == "receiving"


def test_none_and_retiring_stop_it(clock, natives):
    """Nothing of ours is left behind a relay that has left, nor behind an uninstall."""
    for end in (lambda engine, relay: (relay.put(None), relay.get()), lambda engine, relay: engine.retire()):
        engine, relay, _ = rig(clock, natives)
        end(engine, relay)
        assert natives[-1].told[-1] == "stop"
        assert not engine.driver.native


# Silences


def test_a_silence_nobody_stood_in_for_is_counted_and_said(clock, caplog):
    """How often and how long, on the first and then every tenth, hundredth, ...; a pause that was in time is none."""
    engine = Engine(Settings(mode="poll"), Log(lambda: (3, 0)), clock=clock, pause=clock.pause)
    for late_s in (LATE_S / 2, 0.5, *[LATE_S] * 10):
        engine.driver.overslept(late_s)
    status = engine.status()["driver"]
    assert (status["silences"], status["longest_silence_s"]) == (11, 0.5)
    assert [record.message for record in caplog.records] == [
        "rank 3: nobody drove pending sends, 1 times, up to 0.500 s (no native driver: selected)",
        "rank 3: nobody drove pending sends, 10 times, up to 0.500 s (no native driver: selected)",
    ]


def test_the_relay_measures_its_silences(clock):
    """A pause of 100 us that took 50 ms longer."""
    engine = Engine(Settings(max_polls=1, backoff_min_us=100), clock=clock, pause=clock.pause)
    relay = RelayQueue(engine, wait=FakeWait(clock, lambda: clock.pause(0.05), lambda: relay.put("batch")))
    engine.table("send_handles", [None])[0] = FakeRequest(NEVER)
    relay.get()
    assert engine.driver.silences == 1
    assert engine.driver.longest_silence_s == pytest.approx(0.05)


def test_with_a_native_driver_a_silence_is_none(natives):
    """It was stood in for; one that has failed stands in for nobody."""
    driver = started(natives)
    driver._say = pytest.fail
    driver.overslept(1.0)
    assert driver.silences == 0
    said = []
    driver._say = lambda *told: said.append(told)
    natives[0].fails("failed (MPI_Iprobe returned 5)")
    driver.overslept(1.0)
    assert (driver.silences, said) == (1, [(1, 1.0, "failed (MPI_Iprobe returned 5)")])
    driver.stop()  # as an uninstall does under a relay that sleeps
    driver.overslept(1.0)
    assert driver.silences == 1


# On the executor


def executor_of(make, sends=True):
    """Return an executor of a patched class, whose sends are made by `make`."""
    cls = executor_class("E2")
    if not sends:
        cls._ring_broadcast_sample_state = lambda self, batch: None
    Patch(Grafts(cls, recognise(cls), Settings()).all())
    return cls(FakeDist(make))


@pytest.mark.parametrize("relay", [True, False])
def test_it_starts_with_the_relays_queue_and_the_ring_arms_it(natives, relay):
    """Not with the executor, which may never relay; and before the relay sends, in the wait for the slot.

    The executor thread, where it relays, has the GIL itself and takes it from nobody.
    """
    told = []
    executor = executor_of(lambda: told.extend(natives[0].told) or FakeRequest(0))
    driver = engine_of(executor).driver
    assert (driver.status()["runs"], natives) == ("poll", [])
    executor.executed_batch_queue, executor.executed_batch_response_queue = queue.Queue(), queue.Queue()
    assert driver.status()["runs"] == "native"
    if relay:
        engine_of(executor).relay.comes_by()
    executor._ring_broadcast_sample_state(0)
    assert told == (["driven"] if relay else [])


@pytest.mark.parametrize("sends", [True, False])
def test_a_ring_that_sends_nothing_leaves_it_at_rest(natives, sends):
    """The second last rank of an inline era has nobody to wake its relay thread, which would see to that."""
    executor = executor_of(lambda: FakeRequest(NEVER), sends)
    engine_of(executor).driver.start(crowded=False)
    executor.executed_batch_response_queue = queue.Queue()
    executor._ring_broadcast_sample_state(0)
    assert natives[0].armed is sends
    assert natives[0].told == (["driven"] if sends else [])


def test_a_wait_outside_the_ring_leaves_it_at_rest(natives):
    """Era C's flush, and the executor's own wait: the relay's next get() has seen nothing of that send."""
    executor = executor_of(lambda: FakeRequest(NEVER))
    engine_of(executor).driver.start(crowded=False)
    executor.send_handles[0] = FakeRequest(3)
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    told = natives[0].told
    assert ({*told[:-1]}, told[-1]) == ({"driven"}, "idle")
