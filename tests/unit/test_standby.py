"""The standby: what each mode starts, when it is armed and at rest, and what is counted where there is none."""

import queue

import pytest
from fakes import NEVER, FakeDist, FakeRequest, FakeWait, elsewhere, executor_class

from trtllm_pp_progress import _standby
from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._idle import ProgressQueue
from trtllm_pp_progress._mixin import engine_of, grafts
from trtllm_pp_progress._patch import Patch
from trtllm_pp_progress._settings import Settings
from trtllm_pp_progress._standby import SILENT_S, Standby, choose
from trtllm_pp_progress._understudy import CROWDED_SILENCE_S, SILENCE_S, UnderstudyUnavailable


class FakeDriver:
    """A second driver that writes down what it is told."""

    state, ticks = "armed", 3

    def __init__(self, silence_s=0.0):
        self.silence_s, self.told = silence_s, []

    def __getattr__(self, name):
        return lambda: self.told.append(name)


@pytest.fixture
def kinds(monkeypatch):
    """Replace both kinds by fakes; return the table."""
    fakes = {"native": lambda s: FakeDriver(s), "thread": lambda s: FakeDriver(s)}
    monkeypatch.setattr(_standby, "KINDS", fakes)
    return fakes


def refuse(silence_s):
    """Be a kind that cannot run."""
    raise UnderstudyUnavailable("no compiler when this was installed")


@pytest.mark.parametrize(
    ("mode", "runs", "reason"),
    [("auto", "native", "it is built"), ("native", "native", "selected"), ("thread", "thread", "selected")],
)
@pytest.mark.parametrize(("crowded", "silence_s"), [(False, SILENCE_S), (True, CROWDED_SILENCE_S)])
def test_a_mode_starts_its_driver(kinds, mode, runs, reason, crowded, silence_s):
    """With the silence that suits the machine; status says which runs, and why."""
    standby = choose(mode, crowded, print)
    assert standby._driver.silence_s == silence_s
    assert standby.status() == {
        "runs": runs,
        "reason": reason,
        "state": "armed",
        "ticks": 3,
        "silences": 0,
        "longest_silence_s": 0.0,
    }


@pytest.mark.parametrize("mode", ["auto", "native", "thread"])
def test_a_driver_that_cannot_run_leaves_the_polling_one(kinds, mode):
    """Serving starts all the same, and status says what is missing."""
    kinds["native"] = kinds["thread"] = refuse
    status = choose(mode, False, print).status()
    assert (status["runs"], status["reason"]) == ("poll", "no compiler when this was installed")


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError("MPI_ERR_INTERN")])
def test_a_driver_that_fails_in_another_way_does_not_stop_serving(kinds, error):
    """start_worker() must not raise for it."""

    def fail(silence_s):
        raise error

    kinds["native"] = fail
    status = choose("auto", False, print).status()
    assert (status["runs"], status["reason"]) == ("poll", f"native does not start: {error!r}")


def test_poll_starts_nothing(kinds):
    """Selected is selected."""
    kinds.clear()
    status = choose("poll", False, print).status()
    assert (status["runs"], status["reason"], status["state"]) == ("poll", "selected", "none")


def test_a_post_while_rest_is_at_it_is_not_overlooked():
    """What is posted between the question and idle(), and armed before it, is asked for again and armed again."""
    driver = FakeDriver()
    standby = Standby(driver=driver)
    standby.rest(lambda: False)
    standby.rest(lambda: True)
    posted = []
    driver.idle = lambda: (posted.append("send"), standby.arm(), driver.told.append("idle"))
    standby.rest(lambda: bool(posted))
    assert driver.told == ["idle", "driven", "idle", "driven"]


def rig(clock, driver, *script):
    """Return an engine with a standby, its queue on a scripted wait, and a table."""
    engine = Engine(Settings(max_polls=2, backoff_min_us=100), clock=clock, pause=clock.pause)
    engine.standby = Standby(driver=driver)
    relay = ProgressQueue(engine, wait=FakeWait(clock, *script))
    return engine, relay, engine.table("send_handles", [None] * 4)


def test_the_relay_arms_it_while_it_drives_and_rests_it_before_it_sleeps(clock):
    """Armed by tests in vain and at every pause; at rest when the relay sleeps, or leaves, with nothing pending."""
    driver = FakeDriver()
    _, relay, table = rig(clock, driver, None, None, lambda: relay.put("batch"))
    table[0] = FakeRequest(6)
    assert driver.told == ["driven"]
    assert relay.get() == "batch"
    assert driver.told == ["driven"] * 8 + ["idle"] * 2


def test_a_burst_at_the_post_arms_it_at_every_test(clock):
    """A burst may last longer than the silence: the relay is at work all the while."""
    driver = FakeDriver()
    engine, _, table = rig(clock, driver)
    engine.tests_at_post = lambda: 5
    table[0] = FakeRequest(NEVER)
    assert driver.told == ["driven"] * 6


def test_a_post_arms_it_before_it_wakes_the_relay(clock):
    """The sleeping relay needs the GIL to wake up, the standby does not."""
    driver = FakeDriver()
    _, relay, table = rig(
        clock,
        driver,
        lambda: elsewhere(lambda: table.__setitem__(0, FakeRequest(NEVER))),
        lambda: relay.put("batch"),
    )
    assert relay.get() == "batch"
    assert driver.told == ["idle", "driven", "driven", "driven", "receiving"]


def test_none_and_retiring_stop_it(clock):
    """Nothing of ours is left behind a relay that has left, nor behind an uninstall."""
    for end in (lambda engine, relay: (relay.put(None), relay.get()), lambda engine, relay: engine.retire()):
        driver = FakeDriver()
        engine, relay, _ = rig(clock, driver)
        end(engine, relay)
        assert driver.told[-1] == "stop"


def test_a_silence_nobody_stood_in_for_is_counted_and_said(clock, caplog):
    """How often and how long, on the first and then every tenth, hundredth, ...; a pause that was in time is none."""
    engine = Engine(Settings(), lambda: (3, 0), clock=clock, pause=clock.pause)
    engine.standby = choose("poll", False, engine.say.silent)
    for late_s in (SILENT_S / 2, 0.5, *[SILENT_S] * 10):
        engine.standby.overslept(late_s)
    status = engine.status()["driver"]
    assert (status["silences"], status["longest_silence_s"]) == (11, 0.5)
    assert [record.message for record in caplog.records] == [
        "rank 3: nobody drove pending sends, 1 times, up to 0.500 s (no second driver: selected)",
        "rank 3: nobody drove pending sends, 10 times, up to 0.500 s (no second driver: selected)",
    ]


def test_the_relay_measures_its_silences(clock):
    """A pause of 100 us that took 50 ms longer."""
    engine = Engine(Settings(max_polls=1, backoff_min_us=100), clock=clock, pause=clock.pause)
    relay = ProgressQueue(engine, wait=FakeWait(clock, lambda: clock.pause(0.05), lambda: relay.put("batch")))
    engine.table("send_handles", [None])[0] = FakeRequest(NEVER)
    relay.get()
    assert engine.standby.silences == 1
    assert engine.standby.longest_silence_s == pytest.approx(0.05)


def test_with_a_second_driver_a_silence_is_none():
    """It was stood in for."""
    standby = Standby(driver=FakeDriver(), say=pytest.fail)
    standby.overslept(1.0)
    assert standby.silences == 0


def test_it_starts_with_the_relays_queue_and_the_ring_arms_it(kinds):
    """Not with the executor, which may never relay; and before the relay sends, in the wait for the slot."""
    told, cls = [], executor_class("E2")
    Patch(grafts(cls, Settings()))
    executor = cls(FakeDist(lambda: told.extend(engine_of(executor).standby._driver.told) or FakeRequest(0)))
    assert engine_of(executor).standby.runs == "poll"
    executor.executed_batch_queue, executor.executed_batch_response_queue = queue.Queue(), queue.Queue()
    assert engine_of(executor).standby.runs == "native"
    executor._ring_broadcast_sample_state(0)
    assert told == ["driven"]


@pytest.mark.parametrize("sends", [True, False])
def test_a_ring_that_sends_nothing_leaves_it_at_rest(sends):
    """The second last rank of an inline era has nobody to wake its relay thread, which would see to that."""
    cls = executor_class("E2")
    if not sends:
        cls._ring_broadcast_sample_state = lambda self, batch: None
    Patch(grafts(cls, Settings()))
    executor = cls(FakeDist(lambda: FakeRequest(NEVER)))
    engine = engine_of(executor)
    engine.standby, engine.tests_at_post = Standby(driver=(driver := FakeDriver())), lambda: 0
    executor.executed_batch_response_queue = queue.Queue()
    executor._ring_broadcast_sample_state(0)
    assert driver.told == (["driven"] if sends else ["idle"])


def test_a_wait_outside_the_ring_leaves_it_at_rest():
    """Era C's flush, and the executor's own wait: the relay's next get() has seen nothing of that send."""
    cls = executor_class("E2")
    Patch(grafts(cls, Settings()))
    executor = cls(FakeDist(lambda: FakeRequest(NEVER)))
    engine = engine_of(executor)
    engine.standby = Standby(driver=(driver := FakeDriver()))
    executor.send_handles[0] = FakeRequest(3)
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    assert driver.told == ["driven", "driven", "idle"]
