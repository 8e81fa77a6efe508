"""What PyExecutor gains, on the fakes of the eras: exchanged tables and queue, upstream's contracts kept."""

import inspect
import logging
import queue
import sys
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import doubles
import fakes
import pytest
from doubles.stubs import cleanup_stub
from fakes import (
    LIMIT_S,
    NEVER,
    PATCHABLE,
    SLOTS,
    FakeDist,
    FakeMultiHandleWrapper,
    FakeNative,
    FakePart,
    FakeParts,
    FakeRequest,
    FakeTester,
    FakeWork,
    SendFailedError,
    elsewhere,
    executor_class,
    join,
)

from trtllm_pp_progress.driver import choose
from trtllm_pp_progress.patching.patch import Patch
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.progress.table import HandleTable
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.pyexecutor.grafts import Grafts
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue
from trtllm_pp_progress.pyexecutor.shape import QUEUE, TABLES, recognise
from trtllm_pp_progress.settings.core import Settings

AT_ONCE = Settings(drain_deadline_s=0)


def patched(era="E2", settings=AT_ONCE, born=lambda executor: None):
    """Return a fresh class of an era with the grafts on it."""
    cls = executor_class(era)
    Patch(Grafts(cls, recognise(cls), settings, born).all())
    return cls


@pytest.fixture(params=PATCHABLE)
def cls(request):
    """Return a patched class of each era in turn."""
    return patched(request.param)


def run(executor, batches):
    """Start an executor, relay batches, and return once each has been answered."""
    executor.start_worker()
    for batch in range(batches):
        executor.executed_batch_queue.put(batch % SLOTS)
    for _ in range(batches):
        executor.executed_batch_response_queue.get(timeout=LIMIT_S)


# What is exchanged


def test_tables_and_queue_are_exchanged_where_they_are_assigned(cls):
    """After construction the tables report to one engine, and the relay's very first get is ours."""
    senders = []
    executor = cls(FakeDist(lambda: senders.append(engine_of(executor).relay.is_current()) or FakeRequest(0)))
    engine = engine_of(executor)
    for name in TABLES:
        assert isinstance(getattr(executor, name), HandleTable)
        assert engine.tables[name] is getattr(executor, name)
    run(executor, 1)
    assert isinstance(executor.executed_batch_queue, RelayQueue)
    assert executor.executed_batch_queue.maxsize == SLOTS
    assert senders == [True]
    assert type(executor.executed_batch_response_queue) is queue.Queue
    executor.shutdown()


def test_each_executor_has_an_engine_of_its_own_and_is_announced_once(cls):
    """Two lives in one process share nothing."""
    born = []
    cls = patched("E2", born=born.append)
    first, second = cls(), cls()
    assert engine_of(first) is not engine_of(second)
    assert born == [first, second]


@pytest.mark.parametrize(
    "value", [None, (), "text", type("Mine", (list,), {})([None])], ids=["None", "tuple", "text", "subclass"]
)
@pytest.mark.parametrize("name", TABLES)
def test_only_a_plain_list_becomes_a_table(name, value):
    """Anything else assigned there is somebody's own design, and stays what it is."""
    executor = patched()()
    setattr(executor, name, value)
    assert getattr(executor, name) is value


def full():
    """Return a queue that is in use."""
    used = queue.Queue()
    used.put("batch")
    return used


@pytest.mark.parametrize(
    "value", [None, queue.SimpleQueue(), queue.LifoQueue(), full(), MagicMock()], ids=lambda value: type(value).__name__
)
def test_only_a_new_plain_queue_becomes_ours(value):
    """A queue of another kind, or one in use, is left as it is."""
    executor = patched()()
    setattr(executor, QUEUE, value)
    assert getattr(executor, QUEUE) is value


@pytest.mark.parametrize("name", [*TABLES, QUEUE])
def test_an_attribute_that_was_never_assigned_is_missing_as_before(name):
    """hasattr, getattr with a default, and the error's text are those of a plain attribute; del works once."""
    cls = patched()
    executor = object.__new__(cls)
    assert not hasattr(executor, name)
    assert getattr(executor, name, "default") == "default"
    with pytest.raises(AttributeError, match=f"'PyExecutor' object has no attribute '{name}'"):
        getattr(executor, name)
    with pytest.raises(AttributeError):
        delattr(executor, name)
    setattr(executor, name, None)
    delattr(executor, name)
    assert not hasattr(executor, name)
    assert name in vars(cls)


def test_a_value_is_stored_once():
    """Under its own name, beside the one attachment."""
    executor = patched()()
    given = {*TABLES, "_pp_progress"}
    assert {name for name in vars(executor) if "pp_progress" in name or name in TABLES} == given


def test_the_values_stay_in_the_instance():
    """Without the descriptors the executor finds its tables and queue where a plain attribute would be."""
    cls = executor_class("E2")
    patch = Patch(Grafts(cls, recognise(cls), AT_ONCE).all())
    executor = cls()
    table = executor.send_handles
    patch.revert()
    assert executor.send_handles is table


def test_reading_them_calls_nothing_of_pythons():
    """Upstream reads its tables some 20 times a token, in the middle of a step; one older than that is found, too."""
    cls = executor_class("E2")
    older = cls()
    before = older.send_handles
    Patch(Grafts(cls, recognise(cls), AT_ONCE).all())
    executor, called = cls(), []
    executor.send_handles = table = [None]
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        read = executor.send_handles
    finally:
        sys.setprofile(None)
    assert (read, called) == (table, [])
    assert older.send_handles is before


def test_a_table_that_is_assigned_again_reports_as_well():
    """A second list takes the first one's place in the engine."""
    executor = patched()()
    executor.send_handles = [None] * 2
    executor.send_handles[1] = FakeRequest(NEVER)
    assert engine_of(executor).pending()
    assert engine_of(executor).tables["send_handles"] is executor.send_handles


def test_methods_look_like_upstreams(cls):
    """Name, signature and the original behind them are kept."""
    for name in ("wait_on_pp_send_handles", "_ring_broadcast_sample_state", "_executor_loop_cleanup"):
        method = vars(cls)[name]
        assert (method.__name__, inspect.signature(method)) == (name, inspect.signature(method.__wrapped__))
        assert not hasattr(method.__wrapped__, "__wrapped__")


# Waiting


def test_an_empty_slot_is_not_worth_an_engine(cls):
    """Waiting for nothing makes nothing."""
    executor = object.__new__(cls)
    executor.wait_on_pp_send_handles([None], 0)
    assert engine_of(executor) is None


@pytest.mark.parametrize("name", TABLES)
def test_a_wait_drives_instead_of_blocking(cls, name):
    """The patched wait clears the slot with tests alone, in each table."""
    executor = cls()
    handles = getattr(executor, name)
    handles[1] = handle = FakeRequest(600)
    executor.wait_on_pp_send_handles(handles, 1)
    assert (handles[1], handle.tests, handle.waits, executor.events) == (None, 600, 0, [])


def test_a_handle_that_cannot_be_tested_gets_upstreams_wait(cls):
    """The Ray path's wrapper is waited for as upstream does it, once."""
    executor = cls()
    executor.send_handles[1] = handle = FakeMultiHandleWrapper([FakeWork(0)])
    executor.wait_on_pp_send_handles(executor.send_handles, 1)
    assert (handle.waits, executor.send_handles[1], executor.events) == (1, None, [("upstream wait", 1)])


def test_progress_drives_one_slot_and_tells(cls, monkeypatch):
    """The grafted method is the engine's, with its budget and its answer."""
    monkeypatch.setattr("trtllm_pp_progress.progress.burst.DRIVE_S", LIMIT_S)  # the budget alone ends a burst here
    executor = cls()
    executor.send_handles[0] = handle = FakeRequest(NEVER)
    tests = handle.tests
    assert executor.progress_pp_send_handles(executor.send_handles, 0, max_polls=7) is False
    assert handle.tests == tests + 7
    handle.complete()
    assert executor.progress_pp_send_handles(executor.send_handles, 0) is True
    with pytest.raises(ValueError, match="max_polls=0"):
        executor.progress_pp_send_handles(executor.send_handles, 0, max_polls=0)


def test_an_executor_made_before_the_patch_is_driven_through_its_plain_lists():
    """Its tables stay lists, and a wait on them neither blocks nor fails."""
    cls = executor_class("E2")
    executor = cls()
    Patch(Grafts(cls, recognise(cls), AT_ONCE).all())
    executor.send_handles[0] = handle = FakeRequest(600)
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    assert (type(executor.send_handles), executor.send_handles[0], handle.waits) == (list, None, 0)


# The relay


@pytest.mark.parametrize("after", [1, 5, 600])
@pytest.mark.parametrize("era", PATCHABLE)
def test_batches_go_round_without_a_blocking_wait(era, after, kept):
    """Three laps over all slots: every send is driven, slots are reused, upstream's wait is never reached.

    The keeper gets what is pending when the relay leaves, which may be a lap at most.
    """
    cls = patched(era, Settings())
    dist = FakeDist(lambda: FakeRequest(after))
    executor = cls(dist)
    run(executor, 3 * SLOTS)
    executor.shutdown()
    assert len(dist.sent) == 3 * SLOTS
    assert [handle for handle in dist.sent if not handle.seen] == [one.handle for one in kept]
    assert len(kept) <= SLOTS
    assert [handle.waits for handle in dist.sent] == [0] * len(dist.sent)
    assert executor.events == ["notified"]
    assert engine_of(executor).abandoned == []


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "stock"])
def test_the_blocking_flush_becomes_a_drive(is_patched):
    """Era C's relay goes on to the next batch with a send nobody receives; stock, the same relay blocks in it."""
    cls = patched("C") if is_patched else executor_class("C")
    gate = threading.Event()

    def make():
        return FakeRequest(NEVER) if is_patched else FakeRequest(0, inside=lambda: gate.wait(LIMIT_S))

    executor = cls(FakeDist(make))
    executor.start_worker()
    executor.executed_batch_queue.put(0)
    assert executor.executed_batch_response_queue.get(timeout=LIMIT_S) == 0
    executor.executed_batch_queue.put(1)
    if is_patched:
        assert executor.executed_batch_response_queue.get(timeout=LIMIT_S) == 1
        executor.shutdown()
        assert len(engine_of(executor).abandoned) == 2
    else:
        executor.executed_batch_queue.put(None)
        gate.set()
        join(executor.handler)
        assert ("upstream wait", 0) in executor.events


def test_the_flush_is_a_drive_on_the_relay_thread_only():
    """The same call on the executor thread is upstream's wait before slot reuse, and waits until the slot is clear."""
    executor = patched("C")()
    run(executor, 1)
    executor.send_handles[5] = handle = FakeRequest(600)
    executor.wait_on_pp_send_handles(executor.send_handles, 5)
    assert (handle.tests, executor.send_handles[5]) == (600, None)
    executor.shutdown()


def test_a_slot_is_waited_for_before_the_relay_uses_it_again(cls):
    """Within the ring's own method the relay thread's wait is a wait, not a single drive."""
    made = []

    def make():
        made.append(FakeRequest(NEVER if not made else 0))
        return made[-1]

    executor = cls(FakeDist(make))
    run(executor, 1)
    executor.executed_batch_queue.put(0)
    executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    assert len(made) == 1  # answered, and now waiting for its slot
    made[0].complete()
    executor.executed_batch_queue.put(1)
    executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    executor.shutdown()
    assert len(made) == 3
    assert executor.events == ["notified"]


def test_an_error_in_the_ring_does_not_turn_later_waits_into_others(cls):
    """A ring that raises is left as one that returns."""
    executor = cls(FakeDist(lambda: (_ for _ in ()).throw(SendFailedError())))
    executor.executed_batch_response_queue = queue.Queue()
    executor.executed_batch_queue = queue.Queue()
    engine_of(executor).relay.comes_by()
    with pytest.raises(SendFailedError):
        executor._ring_broadcast_sample_state(0)
    executor.send_handles[1] = handle = FakeRequest(NEVER)
    executor.wait_on_pp_send_handles(executor.send_handles, 1)  # the relay thread's flush: a drive
    assert executor.send_handles[1] is handle


# The driver beside the relay


@pytest.fixture
def native(monkeypatch):
    """Let every executor have a native thread, a fake one, beneath the package's own driver; return a list of them."""
    made = []
    monkeypatch.setattr(choose, "NativeDriver", lambda *given, **named: made.append(FakeNative()) or made[-1])
    monkeypatch.setattr(choose, "NativeTester", lambda *given, **named: None)
    return made


def relayed(executor, *batches):
    """Start an executor, relay batches, and end its relay."""
    executor.start_worker()
    for batch in (*batches, None):
        executor.executed_batch_queue.put(batch)
    join(executor.handler)


def test_a_rest_before_the_table_has_the_send_does_not_disarm(native):
    """Another thread asks what is pending between the relay's arm and its write: the send is about to be there."""
    armed = []

    def make():
        elsewhere(lambda: engine_of(executor).driver.rest(engine_of(executor).pending))
        armed.append(native[0].armed)
        return FakeRequest(0)

    executor = patched()(FakeDist(make))
    relayed(executor, 0, 1)
    assert armed == [True, True]
    assert engine_of(executor).posting == set()


def test_after_a_ring_that_sent_nothing_the_driver_is_at_rest(native):
    """A send on a single device is none, though it was about to be one as far as anybody could tell."""
    states = []
    executor = patched()(FakeDist(lambda: states.append(native[0].armed)))
    relayed(executor, 0)
    assert (states, native[0].told[-1]) == ([True], "stop")
    assert "idle" in native[0].told[native[0].told.index("driven") :]


def test_an_isend_that_fails_is_no_post_any_more(native):
    """The ring's error is upstream's; nothing is pending for it."""
    executor = patched()(FakeDist(lambda: (_ for _ in ()).throw(SendFailedError())))
    executor.executed_batch_response_queue = queue.Queue()
    executor.executed_batch_queue = queue.Queue()
    engine_of(executor).relay.comes_by()
    with pytest.raises(SendFailedError):
        executor._ring_broadcast_sample_state(0)
    assert (engine_of(executor).pending(), native[0].armed) == (False, False)


def test_a_wait_outside_the_ring_leaves_the_driver_at_rest(native):
    """Era C's flush, and the executor's own wait: the relay's next get() has seen nothing of that send."""
    executor = patched()()
    executor.executed_batch_queue = queue.Queue()
    executor.send_handles[0] = FakeRequest(3)
    assert native[0].armed
    executor.wait_on_pp_send_handles(executor.send_handles, 0)
    assert not native[0].armed


# The end


@pytest.mark.parametrize("era", PATCHABLE)
def test_cleanup_notifies_first_and_waits_once_for_each_table_and_slot(era, monkeypatch):
    """Upstream's order and number of waits are kept: nothing is drained behind its back before it notified."""
    cls = patched(era)
    executor, calls = cls(), []
    ours = cls.wait_on_pp_send_handles

    def counted(self, handles, slot):
        assert self.is_shutdown
        assert self.shutdown_event.is_set()
        calls.append((id(handles), slot))
        ours(self, handles, slot)

    monkeypatch.setattr(cls, "wait_on_pp_send_handles", counted)
    executor.send_handles[1] = FakeRequest(NEVER)
    executor._executor_loop_cleanup()
    assert len(calls) == len(set(calls)) == len(TABLES) * SLOTS


def test_cleanup_survives_what_is_broken_and_what_never_completes(cls, caplog):
    """Waiters are told, a broken handle is logged once and dropped, a pending one is given up at the deadline."""
    caplog.set_level(logging.DEBUG, logger="trtllm_pp_progress")
    executor = cls()
    executor.send_handles[1] = FakeRequest(error=SendFailedError("peer gone"))
    executor.send_handles[2] = FakeRequest(NEVER)
    executor.send_schedule_handles[3] = FakeRequest(NEVER)
    executor.send_expected_batch_num_handles[4] = good = FakeRequest(5)
    executor._executor_loop_cleanup()
    assert executor.events == ["notified", ("upstream wait", 1)]
    assert good.seen
    for name in TABLES:
        assert getattr(executor, name) == [None] * SLOTS
    assert [(gone.table, gone.slot, gone.rank, gone.peer) for gone in engine_of(executor).abandoned] == [
        ("send_handles", 2, 3, 0),
        ("send_schedule_handles", 3, 3, 0),
    ]
    dropped = [record.getMessage() for record in caplog.records if "failed while closing" in record.getMessage()]
    assert len(dropped) == 1
    assert "send_handles[1]" in dropped[0]


def test_shutdown_ends_with_a_send_that_nobody_receives(cls):
    """The relay leaves, its send is abandoned by number, and nothing blocks."""
    executor = cls(FakeDist(lambda: FakeRequest(NEVER)))
    run(executor, 2)
    executor.shutdown()
    assert {kept.slot for kept in engine_of(executor).abandoned} == {0, 1}


def test_two_lives_in_one_process(cls):
    """An executor can be built, used and shut down, and then another one of the same class."""
    for _ in range(2):
        executor = cls(FakeDist(lambda: FakeRequest(3)))
        run(executor, SLOTS + 1)
        executor.shutdown()
        assert engine_of(executor).abandoned == []
        assert not engine_of(executor).pending()


def test_a_second_life_of_one_executor_has_no_deadline(cls):
    """start_worker() again after shutdown(): waits last as long as they take, and drivers start anew."""
    executor = cls(FakeDist(lambda: FakeRequest(3)))
    run(executor, 1)
    executor.shutdown()
    engine = engine_of(executor)
    assert engine.deadline is not None
    run(executor, 1)
    assert (engine_of(executor) is engine, engine.deadline) == (True, None)
    executor.send_schedule_handles[1] = handle = FakeRequest(20_000)
    executor.wait_on_pp_send_handles(executor.send_schedule_handles, 1)
    assert (handle.seen, engine.abandoned) == (True, [])
    executor.shutdown()


@pytest.mark.parametrize("way", ["its own queue", "started before"])
def test_an_executor_that_we_do_not_relay_for_has_what_an_end_needs(way, monkeypatch):
    """Its waits get a deadline, so what they abandon is driven; and a second life has none."""
    cls = executor_class("E2")
    executor = cls(FakeDist(lambda: FakeRequest(NEVER)))
    if way == "started before":
        executor.start_worker()
        run(executor, 0)
    Patch(Grafts(cls, recognise(cls), Settings(drain_deadline_s=0, mode="poll")).all())
    if way == "its own queue":
        monkeypatch.setattr(fakes, "queue", SimpleNamespace(Queue=type("Traced", (queue.Queue,), {})))
        executor = cls(FakeDist(lambda: FakeRequest(NEVER)))
    run(executor, 1)
    executor.wait_on_pp_send_handles(executor.send_schedule_handles, 0)
    assert KEEPER.drives
    executor.shutdown()
    engine = engine_of(executor)
    assert ([given_up.slot for given_up in engine.abandoned], len(KEEPER.sends)) == ([0], 1)
    run(executor, 0)
    assert engine.deadline is None
    executor.shutdown()


def test_a_wait_that_the_deadline_left_behind_leaves_the_next_lifes_send_alone(cls):
    """Upstream's wait goes on in a thread; when it ends, its slot may hold another send."""
    executor = cls(FakeDist(lambda: FakeRequest(3)))
    received = threading.Event()
    executor.send_handles[1] = SimpleNamespace(wait=lambda: received.wait(LIMIT_S))  # no test
    executor._executor_loop_cleanup()
    (left_behind,) = [thread for thread in threading.enumerate() if thread.name == "pp-upstreams-wait"]
    run(executor, 1)
    executor.send_handles[1] = later = FakeRequest(NEVER)
    received.set()
    left_behind.join(LIMIT_S)
    assert not left_behind.is_alive()
    assert (executor.send_handles[1], engine_of(executor).pending()) == (later, True)
    later.complete()
    executor.shutdown()


# Eras F to H: the executor thread relays


class Inline:
    """An executor of an era whose executor thread relays, on a fake rank; its threads are not started."""

    def __init__(self, era, monkeypatch, deadline=0.01):
        monkeypatch.setenv("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", "0")
        cls = doubles.executor_class(era)
        Patch(Grafts(cls, recognise(cls), Settings(drain_deadline_s=deadline)).all())
        self.dist = FakeDist(lambda: FakeRequest(NEVER))
        self.executor = cls(self.dist)
        self.executor.executed_batch_queue = queue.Queue()
        self.executor.executed_batch_response_queue = queue.Queue()


@pytest.mark.parametrize("era", doubles.INLINE)
def test_a_drain_before_a_forward_ends_in_time(era, monkeypatch):
    """The send stays where it is, pending; in a table of the executor's own a wait has no such end."""
    executor = Inline(era, monkeypatch).executor
    executor._pp_mpi_progress = (lambda: True, 0.005)
    executor.send_handles[1] = handle = FakeRequest(NEVER)
    for _ in range(3):
        executor.wait_on_pp_send_handles(executor.send_handles, 1)
    assert executor.send_handles[1] is handle
    assert engine_of(executor).abandoned == []
    executor.send_schedule_handles[1] = FakeRequest(5000)
    executor.wait_on_pp_send_handles(executor.send_schedule_handles, 1)
    assert executor.send_schedule_handles[1] is None


@pytest.mark.parametrize("era", ["G", "H", "I"])
def test_what_the_last_rank_does_not_drain_is_looked_at(era, monkeypatch):
    """It waits for the slot that is due alone; the executor has been in MPI since it sent the others."""
    inline = Inline(era, monkeypatch)
    executor, engine = inline.executor, engine_of(inline.executor)
    inline.dist.pp_size, inline.dist.is_last_pp_rank = SLOTS, True
    engine.driver.tester = FakeTester()
    at_post = engine.settings.max_polls
    executor.send_handles[0] = parts = FakeParts([FakePart(at_post + 1)])
    assert (parts[0].tests, engine.pending()) == (at_post, True)
    executor._drain_relay_sends_before_forward(0)
    assert (executor.send_handles[0], parts[0].seen, engine.pending()) == (None, True, False)


def test_a_slot_is_never_used_again_before_its_send_is_complete(monkeypatch):
    """Within the ring the wait is for as long as it takes: no send is lost by a drain that gave up."""
    inline = Inline("F", monkeypatch, deadline=0)
    executor, state = inline.executor, doubles.SampleState([], "host")
    inline.dist.is_last_pp_rank, inline.dist.is_second_last_pp_rank = True, False
    executor._ring_broadcast_sample_state(doubles.BatchStatePP(1, state))
    executor.wait_on_pp_send_handles(executor.send_handles, 1)
    first = inline.dist.sent[0]
    assert executor.send_handles[1] is first
    first.after = first.tests + 20_000
    executor._ring_broadcast_sample_state(doubles.BatchStatePP(1, state))
    assert first.seen
    assert engine_of(executor).status()["tables"]["send_handles"]["displaced"] == 0


def test_where_the_relay_thread_may_not_drive_the_drain_is_upstreams(monkeypatch):
    """Era H with its pump off: to go on would park the send."""
    executor = Inline("H", monkeypatch, deadline=0).executor
    executor.send_handles[1] = FakeRequest(20_000)
    executor.wait_on_pp_send_handles(executor.send_handles, 1)
    assert executor.send_handles[1] is None


def test_the_thread_s_relay_is_not_taken_for_the_executor_s(monkeypatch):
    """With TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE=1 nothing drains before a forward, and no wait is cut short."""
    inline = Inline("G", monkeypatch, deadline=0)
    inline.executor.pp_async_broadcast_sample_state = True
    inline.executor.send_handles[1] = FakeRequest(20_000)
    inline.executor.wait_on_pp_send_handles(inline.executor.send_handles, 1)
    assert inline.executor.send_handles[1] is None


@pytest.mark.parametrize("era", doubles.INLINE)
def test_the_cleanup_of_such_an_executor_ends_at_its_deadline(era, monkeypatch):
    """At the end a send that nobody receives is given up, as in any era."""
    executor = Inline(era, monkeypatch, deadline=0).executor
    executor.send_handles[1] = FakeRequest(NEVER)
    executor._executor_loop_cleanup()
    assert [kept.slot for kept in engine_of(executor).abandoned] == [1]


# Over torch.distributed


@pytest.mark.parametrize("era", doubles.PATCHED)
def test_under_ray_every_wait_is_upstreams(era):
    """Tables and queue are as upstream made them, and there is no engine."""
    cls = doubles.executor_class(era)
    Patch(Grafts(cls, recognise(cls), AT_ONCE).all())
    executor = cls(doubles.TorchDist(4, 3))
    executor.executed_batch_queue = queue.Queue()
    executor.send_handles[1] = handle = FakeMultiHandleWrapper([FakeWork(0)])
    executor.send_handles[2] = other = FakeMultiHandleWrapper([FakeWork(0)])
    executor.wait_on_pp_send_handles(executor.send_handles, 1)
    executor._executor_loop_cleanup()
    assert (handle.waits, other.waits, executor.send_handles[:3]) == (1, 1, [None] * 3)
    assert {type(getattr(executor, name)) for name in TABLES} == {list}
    assert type(executor.executed_batch_queue) is queue.Queue
    assert engine_of(executor) is None


# What upstream's order is, in every era


class Told:
    """What a condition and an event of a cleanup tell."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def notify_all(self):
        """Note it."""
        self.events.append(self.name)

    set = notify_all


def cleaned_up(cls):
    """Return what happened, in order, in the cleanup of a stub with a send that is complete in each table."""
    events = []
    stub = cleanup_stub(cls, **{name: FakeRequest(0) for name in TABLES})
    stub.response_cv, stub.shutdown_event = Told(events, "notified"), Told(events, "set")
    wait = cls.wait_on_pp_send_handles

    def wait_on_pp_send_handles(send_handles, slot):
        events.append((next(name for name in TABLES if getattr(stub, name) is send_handles), slot))
        wait(stub, send_handles, slot)

    vars(stub)["wait_on_pp_send_handles"] = wait_on_pp_send_handles
    stub._executor_loop_cleanup()
    return events


@pytest.mark.parametrize("era", doubles.PATCHED)
def test_the_cleanup_keeps_upstreams_order_in_every_era(era):
    """Patched or not: whom it tells when, and exactly one wait for each table and slot."""
    stock, cls = cleaned_up(doubles.executor_class(era)), doubles.executor_class(era)
    Patch(Grafts(cls, recognise(cls), AT_ONCE).all())
    assert cleaned_up(cls) == stock
    assert [event for event in stock if type(event) is tuple] == [(name, 0) for name in TABLES]
    assert (stock[:2] == ["notified", "set"]) == (era not in ("B/D", "C", "E1"))


@pytest.mark.parametrize("era", doubles.PATCHED)
def test_a_stub_of_mocks_is_waited_for_once_a_table(era):
    """Upstream's own tests hold it to that."""
    cls = doubles.executor_class(era)
    Patch(Grafts(cls, recognise(cls), AT_ONCE).all())
    stub = cleanup_stub(cls)
    mocks = [getattr(stub, name)[0] for name in TABLES]
    stub._executor_loop_cleanup()
    for mock in mocks:
        mock.wait.assert_called_once_with()
    assert stub.is_shutdown
