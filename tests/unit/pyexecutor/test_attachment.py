"""What an executor gets: one engine, the verdict on it, and an end at which its sends are not lost."""

import gc
import logging
import math
import os
import queue
import sys
import threading
import weakref

import pytest
from doubles import TorchDist, executor_class
from fakes import (
    LIMIT_S,
    NEVER,
    FakeDist,
    FakeMpi,
    FakeMpiRequest,
    FakeMultiHandleWrapper,
    HookedLock,
    elsewhere,
)

from trtllm_pp_progress.mpi import cores as _cores
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.pyexecutor import attachment as _attachment
from trtllm_pp_progress.pyexecutor.attachment import attach, attachment_of, engine_of
from trtllm_pp_progress.pyexecutor.shape import ASYNC, QUEUE, TABLES, recognise
from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.tools.doctor import machine as doctor

SETTINGS = Settings(drain_deadline_s=7, mode="poll")


class Executor:
    """Something with a dict, in the place of an executor."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def verdict_of(era="E2"):
    """Return the verdict on a class of an era."""
    return recognise(executor_class(era))


def attached(executor, era="E2", born=lambda executor: None):
    """Attach as the grafts do."""
    return attach(executor, SETTINGS, verdict_of(era), born)


# One engine


def test_an_attachment_is_made_once_and_announced_once():
    """It is kept in the executor, under one name, and found there."""
    executor, born = Executor(), []
    assert (attachment_of(executor), engine_of(executor)) == (None, None)
    first = attached(executor, born=born.append)
    assert attached(executor, born=born.append) is first is attachment_of(executor)
    assert engine_of(executor) is first.engine
    assert born == [executor]
    assert set(vars(executor)) == {"_pp_progress"}


def test_threads_that_meet_in_the_first_use_get_one_engine(monkeypatch):
    """It is made under a lock, although another thread makes it just before that lock is taken."""
    executor, born, found = Executor(), [], []

    def meet():
        found.append(elsewhere(lambda: attached(executor, born=born.append)))

    monkeypatch.setattr(_attachment, "_creating", HookedLock(_attachment._creating, meet))
    found.append(attached(executor, born=born.append))
    assert (found[0] is found[1], born) == (True, [executor])


class Cycle:
    """Keeps what it holds until a garbage collection."""

    def __init__(self, held):
        self.held, self.itself = held, self


def collecting(monkeypatch):
    """Let every engine that is made begin with a garbage collection."""

    class Collecting(Engine):
        """An engine."""

        def __init__(self, *given):
            gc.collect()
            super().__init__(*given)

    monkeypatch.setattr(_attachment, "Engine", Collecting)


def test_a_collection_inside_may_end_an_executor_that_comes_back(monkeypatch):
    """Its destructor uses what is patched, and makes its attachment, on a thread that is making another one."""
    made = []

    class Old(Executor):
        """Ends in a collection."""

        def __del__(self):
            made.append(attached(self).engine.number)

    collecting(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        Cycle(Old())
        new = elsewhere(lambda: attached(Executor()))
    finally:
        gc.enable()
    assert made == [new.engine.number - 1]


def test_a_collection_inside_may_end_an_executor_with_sends(monkeypatch, kept):
    """They go to the keeper, which takes no lock."""
    old = Executor()
    handle = attached(old).engine.table("send_handles", [FakeMpiRequest(NEVER)])[0]
    collecting(monkeypatch)
    gc.disable()
    try:
        Cycle(old)
        del old
        assert elsewhere(lambda: attached(Executor())).engine is not None
    finally:
        gc.enable()
    assert [record.handle for record in kept] == [handle]


# The end


def test_the_sends_of_a_collected_executor_are_driven_until_they_are_complete():
    """Every table of it; MPI may still read their buffers, and nobody else knows them."""
    KEEPER.start("poll", crowded=False)
    executor, freed, tested, asked = Executor(), [], [], []
    for name in ("send_handles", "send_schedule_handles"):
        buffer = type("Buffer", (), {})()
        freed.append(threading.Event())
        tested.append(threading.Event())
        weakref.finalize(buffer, freed[-1].set).atexit = False
        handle = FakeMpiRequest(NEVER, inside=tested[-1].set, payload=buffer)
        asked.append(weakref.ref(handle))
        attached(executor).engine.table(name, [None])[0] = handle
        del handle, buffer
    Cycle(executor)
    del executor
    gc.collect()
    for event in tested:
        assert event.wait(LIMIT_S)
    assert not any(event.is_set() for event in freed)
    for handle in asked:
        handle().complete()
    for event in freed:
        assert event.wait(LIMIT_S)


def test_a_handle_left_to_upstream_outlives_its_executor():
    """Nobody can tell when it is complete."""
    executor = Executor()
    payload = type("Buffer", (), {})()
    alive = weakref.ref(payload)
    handle = FakeMultiHandleWrapper([])
    handle.payload = payload
    attached(executor).engine.table("send_handles", [handle])
    del handle, payload, executor
    gc.collect()
    assert alive() is not None


def test_an_executor_is_not_kept_alive():
    """Neither by its engine, nor by what says its rank in messages, nor by the keeper."""
    executor = Executor(dist=FakeDist())
    attachment = attached(executor)
    alive = weakref.ref(executor)
    assert attachment.engine.log.identify() == (3, 0)
    del executor
    gc.collect()
    assert alive() is None
    assert attachment.engine.log.identify() == (3, 0)  # as it was last said


# The verdict


def test_until_its_worker_starts_the_class_s_verdict_counts():
    """Then its own, made once, of what it has when start_worker() is over."""
    executor = Executor(dist=FakeDist())
    attachment = attached(executor, "F")
    assert attachment.verdict(executor) is attachment.of_class
    attachment.begin_life(executor)
    assert attachment.verdict(executor) is attachment.of_class
    vars(executor)[QUEUE] = queue.Queue()
    own = attachment.verdict(executor)
    assert own.executor.dist == "FakeDist"
    assert attachment.verdict(executor) is own
    attachment.begin_life(executor)
    assert attachment.verdict(executor) is not own


@pytest.mark.parametrize("pump", [None, (lambda: True, 0.005)], ids=["pump off", "pump on"])
def test_what_start_worker_makes_after_the_queue_counts_for_the_drains(pump, monkeypatch):
    """Era H: with the pump off nobody else drives, and a drain before a forward has no end."""
    made = []
    monkeypatch.setattr(_attachment, "Drains", lambda engine, patience: made.append(patience) or Waited())

    class Waited:
        """Drains that end at once."""

        def wait(self, *given):
            """Return."""

    executor = Executor(dist=FakeDist())
    attachment = attached(executor, "H")
    attachment.begin_life(executor)
    vars(executor)[QUEUE] = queue.Queue()
    vars(executor)["_pp_mpi_progress"] = pump
    for _ in range(2):
        attachment.wait_before_forward(executor, [None], 0, lambda: None)
    assert made == [SETTINGS.drain_deadline_s if pump else math.inf]


def test_a_life_begins_with_its_driver_and_the_keeper(monkeypatch):
    """Only where a thread of ours may enter MPI; and what differs from the class's verdict is said."""
    started = []
    monkeypatch.setattr(KEEPER, "start", lambda mode, crowded, patience_s: started.append((mode, patience_s)))
    executor = Executor(dist=FakeDist())
    attachment = attached(executor)
    monkeypatch.setattr(attachment.engine.driver, "start", lambda crowded: started.append("driver"))
    attachment.start_keeper()
    assert attachment.begin_life(executor).may_drive
    assert started == [("poll", attachment.engine.settings.drain_deadline_s), "driver"]


@pytest.mark.parametrize(("era", "is_async", "rank", "urgent"), [
    ("G", False, 3, True), ("G", False, 0, False), ("G", True, 3, False), ("G", None, 3, False), ("E2", None, 3, False),
])  # fmt: skip
def test_what_the_last_rank_s_executor_thread_has_sampled_is_urgent(era, is_async, rank, urgent):
    """The first rank waits for it, and there nothing does; where a thread relays, that thread drives."""
    dist = FakeDist()
    dist.pp_rank = rank
    executor = Executor(dist=dist) if is_async is None else Executor(dist=dist, **{ASYNC: is_async})
    attachment = attached(executor, era)
    tables = [attachment.engine.table(name, [None]) for name in TABLES]
    attachment.begin_life(executor)
    assert [table.sends.urgent for table in tables] == [urgent, False, False]


@pytest.mark.parametrize(("allowed", "limit", "few"), [(64, None, False), (64, 1.5, True), (1, None, True)])
def test_case_81_82_quotas_and_masks_count_for_its_driver(allowed, limit, few, monkeypatch):
    """ninja-build/ninja#2805, NVIDIA/TensorRT-LLM#18117: what doctor reports is what the native thread goes by."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)))
    monkeypatch.setattr(_cores, "quota", lambda root=None: limit)
    for name in _cores.LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    told = []
    monkeypatch.setattr(KEEPER, "start", lambda mode, crowded, patience_s: told.append(crowded))
    executor = Executor(dist=FakeDist())
    attachment = attached(executor)
    monkeypatch.setattr(attachment.engine.driver, "start", told.append)
    attachment.start_keeper()
    attachment.begin_life(executor)
    assert told == [few, few]
    seen = doctor.cores({})
    assert (seen["allowed"], seen["quota"]) == (allowed, limit)


@pytest.mark.parametrize("why", ["Ray", "below THREAD_MULTIPLE"])
def test_where_nobody_may_drive_nothing_is_started(why, monkeypatch, caplog):
    """At ERROR where we stand down: upstream drops warnings of all ranks but the leader."""
    caplog.set_level(logging.INFO, logger="trtllm_pp_progress")
    if why != "Ray":
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", FakeMpi(level=2))
    executor = Executor(dist=TorchDist(4, 3) if why == "Ray" else FakeDist())
    attachment = attached(executor)
    if why != "Ray":
        attachment.start_keeper()
    assert not attachment.begin_life(executor).may_drive
    assert KEEPER._thread is None
    (record,) = caplog.records
    assert record.levelno == (logging.ERROR if why == "Ray" else logging.INFO)
    assert why.split()[-1] in record.getMessage()
    assert record.getMessage().startswith("this executor (era E2): ")


def test_a_second_life_has_drains_as_patient_as_new():
    """What the first one's have waited in vain is over."""
    executor = Executor(dist=FakeDist())
    attachment = attached(executor, "F")
    attachment.begin_life(executor)
    attachment.wait_before_forward(executor, attachment.engine.table("send_handles", [None]), 0, lambda: None)
    assert attachment.drains is not None
    attachment.begin_life(executor)
    assert attachment.drains is None
