"""NVTX ranges: around drives, posts, waits and drains where they are asked for, and nothing at all where not."""

import logging
import sys
from contextlib import ContextDecorator
from types import ModuleType

import pytest
from fakes import FakeDist, FakeRequest, executor_class

import trtllm_pp_progress
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.pyexecutor import ranges
from trtllm_pp_progress.pyexecutor.attachment import Attachment, engine_of
from trtllm_pp_progress.pyexecutor.grafts import Grafts
from trtllm_pp_progress.pyexecutor.shape import recognise
from trtllm_pp_progress.settings.core import Settings


@pytest.fixture(autouse=True)
def _anew():
    """Look for nvtx again in each test."""
    ranges._nvtx.cache_clear()
    yield
    ranges._nvtx.cache_clear()


@pytest.fixture
def seen(monkeypatch):
    """Put an nvtx in place, and return the ranges that were begun and ended."""
    marks = []

    class annotate(ContextDecorator):
        def __init__(self, message, domain):
            self.message = message
            assert domain == ranges.DOMAIN

        def __enter__(self):
            marks.append(("begin", self.message))

        def __exit__(self, *error):
            marks.append(("end", self.message))

    module = ModuleType("nvtx")
    module.annotate = annotate
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return marks


def test_every_part_has_its_range(seen):
    """Begun and ended, also the one inside another."""
    cls = executor_class("E2")
    with trtllm_pp_progress.install(cls, mode="poll", nvtx="1"):
        executor = cls(FakeDist())
        executor.send_handles[0] = FakeRequest(3)
        assert seen == [("begin", "post"), ("end", "post")]
        del seen[:]
        executor.progress_pp_send_handles(executor.send_handles, 0, 1)
        assert seen == [("begin", "drive"), ("end", "drive")]
        del seen[:]
        executor.wait_on_pp_send_handles(executor.send_handles, 0)
    assert seen[0] == ("begin", "wait")
    assert seen[-1] == ("end", "wait")
    assert ("begin", "drive") in seen


def test_a_drain_is_one(seen):
    """Of the executor thread, before a forward."""
    cls = executor_class("E2")
    grafts = Grafts(cls, recognise(cls), Settings(nvtx="1"))
    attachment = Attachment.__new__(Attachment)
    attachment.drains = type("Drains", (), {"wait": lambda *given: seen.append("drained")})()
    grafts._wait_before_forward(attachment, None, [], 0, None)
    assert seen == [("begin", "drain"), "drained", ("end", "drain")]


def test_a_range_ends_with_what_raises(seen):
    """Or every later one would be inside it."""
    with pytest.raises(ZeroDivisionError):
        ranges.ranged(Settings(nvtx="1"), "drive", lambda: 1 / 0)()
    assert seen == [("begin", "drive"), ("end", "drive")]


def test_off_nothing_is_wrapped(seen):
    """Neither a function nor an engine, and nvtx is not imported."""
    cls = executor_class("E2")
    with trtllm_pp_progress.install(cls, mode="poll"):
        engine = engine_of(executor := cls(FakeDist()))
        assert "posted" not in vars(engine)
        assert not {"run", "finish"} & vars(engine.burst).keys()
    grafts = Grafts(cls, recognise(cls), Settings())
    assert grafts._wait_for_slot is wait_for_slot
    assert grafts._wait_before_forward is Attachment.wait_before_forward
    assert ranges._nvtx.cache_info().misses == 0
    assert executor is not None


def test_without_nvtx_there_is_one_warning(monkeypatch, caplog):
    """Whatever the number of executors; nothing is wrapped."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    cls = executor_class("E2")
    with caplog.at_level(logging.WARNING), trtllm_pp_progress.install(cls, mode="poll", nvtx="1"):
        engines = [engine_of(executor) for executor in (cls(FakeDist()), cls(FakeDist()))]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no NVTX ranges"]
    assert "posted" not in vars(engines[0])


def test_nvtx_itself_takes_it():
    """Where it is installed."""
    pytest.importorskip("nvtx")
    assert ranges.ranged(Settings(nvtx="1"), "drive", lambda one: one + 1)(1) == 2
