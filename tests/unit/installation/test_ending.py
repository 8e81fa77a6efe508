"""The end of a process: deadlines first, idle threads leave MPI, native drivers stay; a forked child has nothing."""

import os
import signal
import sys
import threading

import pytest
from fakes import (
    LIMIT_S,
    NEVER,
    FakeClock,
    FakeDist,
    FakeDriver,
    FakeMpi,
    FakeRequest,
    executor_class,
    join,
    start,
)

import trtllm_pp_progress as package
from trtllm_pp_progress.driver.choose import Driver
from trtllm_pp_progress.installation.ending import close_all, finish_all, retire_all
from trtllm_pp_progress.installation.records import INSTALLED, engines
from trtllm_pp_progress.mpi import facts
from trtllm_pp_progress.progress import engine as _engine
from trtllm_pp_progress.progress.handles import completion_of
from trtllm_pp_progress.progress.keeper import KEEPER, Kept


@pytest.fixture
def told(monkeypatch):
    """Let every engine have a fake driver, and return what all of them and the keeper's were told."""
    driver = FakeDriver(native=True)
    monkeypatch.setattr(_engine, "Driver", lambda *given: driver)
    monkeypatch.setattr(Driver, "stop", lambda self, timeout_s=None: driver.told.append("keeper's stop"))
    return driver.told


@pytest.fixture
def executor():
    """Return an executor of a patched class, with no time left once it is closed."""
    cls = executor_class("E2")
    package.install(cls, drain_deadline_s=0, mode="poll")
    return cls(FakeDist(lambda: FakeRequest(NEVER)))


def relayed(executor):
    """Start an executor, and return once it has relayed a batch, whose send is pending."""
    executor.start_worker()
    executor.executed_batch_queue.put(0)
    executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    return executor


def engine_of(executor):
    """Return the engine."""
    (engine,) = [engine for engine in engines() if engine.tables["send_handles"] is executor.send_handles]
    return engine


# At exit


def test_at_exit_every_wait_has_an_end(executor):
    """A second executor of the process, too; upstream's own shutdown, after us, ends in time."""
    other = type(executor)(FakeDist(lambda: FakeRequest(NEVER)))
    for one in (executor, other):
        relayed(one)
    close_all()
    assert [engine.deadline is not None for engine in engines()] == [True, True]
    for one in (executor, other):
        join(start(one.shutdown))
        assert one.events == ["notified"]
        assert [given_up.slot for given_up in engine_of(one).abandoned] == [0]


def test_upstreams_shutdown_may_come_before_ours(executor):
    """Then there is nothing left to close."""
    relayed(executor)
    join(start(executor.shutdown))
    close_all()
    assert [given_up.slot for given_up in engine_of(executor).abandoned] == [0]


def test_at_exit_nothing_is_taken_away_from_upstream(told, executor):
    """Engines go on, and so do native drivers, until MPI_Finalize: the interpreter's end is not yet MPI's."""
    executor.send_handles[0] = handle = FakeRequest(NEVER)
    close_all()
    engine = engine_of(executor)
    assert (engine.retired, "stop" in told, "keeper's stop" in told) == (False, False, False)
    assert engine.drive() is False
    assert handle.tests > 0


def test_at_exit_the_relay_leaves_mpi(executor):
    """It must not be inside while MPI is finalized: it tests nothing any more, though a send is pending."""
    drove, slept = threading.Event(), threading.Semaphore(0)
    executor.dist.make = lambda: FakeRequest(NEVER, inside=drove.set)
    relayed(executor)
    assert drove.wait(LIMIT_S)
    relay = engine_of(executor).relay
    falls_asleep = relay.falls_asleep
    relay.falls_asleep = lambda condition: (falls_asleep(condition), relay.out and slept.release())
    close_all()
    assert slept.acquire(timeout=LIMIT_S)
    tests = executor.dist.sent[0].tests
    relay.wake()
    assert slept.acquire(timeout=LIMIT_S)
    assert (executor.dist.sent[0].tests, engine_of(executor).pending()) == (tests, True)
    executor.shutdown()


def test_at_exit_the_keeper_leaves_mpi(executor):
    """Its Python thread has ended; what it keeps stays alive."""
    relayed(executor)
    executor.shutdown()
    thread = KEEPER._thread
    close_all()
    assert not thread.is_alive()
    assert [kept.handle for kept in KEEPER.sends] == executor.dist.sent


@pytest.mark.parametrize(("vendor", "times"), [("Open MPI", 1), ("MPICH", 2)])
def test_a_shutdown_that_comes_after_ours_has_the_keepers_time_as_well(vendor, times, monkeypatch):
    """Nobody drives what it abandons, so where MPI_Finalize makes no progress its waits go on for as long."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMpi(vendor=vendor))
    package.install(cls := executor_class("E2"), drain_deadline_s=100, mode="poll")
    executor = cls(FakeDist())
    engine = engine_of(executor)
    before = engine.clock()
    close_all()
    assert engine.deadline == pytest.approx(before + times * 100, abs=LIMIT_S)


def test_a_cleanup_long_after_the_exit_began_has_its_whole_time(monkeypatch):
    """Other exit handlers may take their time; one that is under way at the exit gets no more."""
    package.install(cls := executor_class("E2"), drain_deadline_s=5, mode="poll")
    executor = cls(FakeDist())
    engine = engine_of(executor)
    engine.clock = clock = FakeClock()
    close_all()
    assert engine.deadline == clock() + 5
    clock.now += 3
    close_all()
    assert engine.deadline == clock() + 2
    executor._executor_loop_cleanup()
    assert engine.deadline == clock() + 5


def test_below_thread_multiple_nothing_ends_before_its_time(monkeypatch):
    """Nobody could drive what is given up: shutdown and exit wait as upstream does."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMpi(level=2))
    package.install(cls := executor_class("E2"), drain_deadline_s=0, mode="poll")
    executor = cls(FakeDist(lambda: FakeRequest(NEVER)))
    executor._executor_loop_cleanup()
    close_all()
    assert engine_of(executor).deadline is None


# When MPI is finalized by hand


@pytest.fixture
def mpi(monkeypatch):
    """Put an MPI in place, and return it."""
    fake = FakeMpi()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    return fake


def test_when_mpi_is_finalized_every_engine_retires_first(mpi, told, executor):
    """While MPI still works; nobody tests any more, and no wait is upstream's."""
    executor.send_handles[0] = handle = FakeRequest(NEVER)
    seen = []
    mpi.attributes.insert(0, lambda *given: seen.append((engine_of(executor).retired, mpi.finalized)))
    mpi.Finalize()
    assert seen == [(True, False)]
    assert told[-2:] == ["stop", "keeper's stop"]
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    assert (handle.touches, executor.events) == (0, [])
    assert facts.state() is facts.State.FINALIZED


def test_before_that_the_keeper_has_its_time(monkeypatch, mpi):
    """Where MPI_Finalize makes no progress: a receiver within another deadline gets its message, then all leave MPI."""
    mpi.vendor = "MPICH"
    package.install(cls := executor_class("E2"), drain_deadline_s=LIMIT_S, mode="poll")
    executor = cls()
    monkeypatch.setattr(KEEPER, "finish", lambda finish=KEEPER.finish: (handle.complete(), finish()))
    handle = FakeRequest(NEVER)
    KEEPER.keep(Kept(handle, completion_of(handle)))
    alive = []
    mpi.attributes.insert(0, lambda *given: alive.append(KEEPER._thread.is_alive()))  # the last one that MPI deletes
    mpi.Finalize()
    assert (KEEPER.sends, alive, engine_of(executor).retired) == ([], [False], True)


def test_the_end_is_announced_once(mpi, executor):
    """However many executors there are."""
    type(executor)()
    type(executor)()
    assert len(mpi.attributes) == 2  # every engine leaves MPI, and before that the keeper gets its time


def test_without_mpi_nothing_is_announced(executor, monkeypatch):
    """Nobody asks mpi4py for anything."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    type(executor)()
    assert "mpi4py.MPI" not in sys.modules


# In a forked child


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("told_of_it", [True, False])
def test_a_forked_child_has_no_executors(executor, told_of_it):
    """A lock came along locked and its owner did not. Control: one that is not told of the fork has the parent's."""
    lock = executor.send_handles.sends.lock
    with lock:
        if not (pid := os.fork()):
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
                if not told_of_it:
                    INSTALLED[type(executor)].executors.add(executor)
                close_all()
                found = len(engines())
                retire_all()
                os._exit(found)
            finally:
                os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (0 if told_of_it else 1)
    assert len(engines()) == 1


@pytest.mark.parametrize(("vendor", "waits"), [("Open MPI", False), ("MPICH", True), ("Intel MPI", True)])
def test_the_keeper_gets_its_time_where_finalize_makes_no_progress(vendor, waits, monkeypatch):
    """MPICH closes its endpoints first of all: what the keeper has would be lost to a receiver that is late."""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMpi(vendor=vendor))
    asked = []
    monkeypatch.setattr(KEEPER, "finish", lambda: asked.append("finish"))
    finish_all()
    assert bool(asked) is waits
