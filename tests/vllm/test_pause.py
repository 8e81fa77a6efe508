"""A pause that keeps requests is told to the workers, and is vLLM's own in everything else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trtllm_pp_progress.patching.patch import Patch
from trtllm_pp_progress.vllm import pause


class EngineCore:
    """Pauses, and notes what its workers were called for."""

    def __init__(self, error=None):
        self.calls = []
        self.model_executor = SimpleNamespace(collective_rpc=self._rpc)
        self.error = error

    def _rpc(self, method, non_block=False):
        self.calls.append((method, non_block))
        if self.error:
            raise self.error

    def pause_scheduler(self, mode="abort", clear_cache=True):
        self.calls.append((mode, clear_cache))
        return "paused"


class EngineCoreProc(EngineCore):
    """Pauses in its own way."""

    def pause_scheduler(self, mode="abort", clear_cache=True):
        self.calls.append(("in a process", mode))
        return "will pause"


class Derived(EngineCoreProc):
    """Pauses as its parent does."""


@pytest.fixture
def patched():
    """Patch these classes as those of vLLM's module."""
    module = SimpleNamespace(EngineCore=EngineCore, EngineCoreProc=EngineCoreProc, Derived=Derived, other=3)
    patch = Patch(pause.grafts(module))
    yield patch
    patch.revert()
    assert EngineCore.pause_scheduler.__name__ == "pause_scheduler"


TOLD = ("check_health", True)


@pytest.mark.parametrize("call", [lambda e: e.pause_scheduler("keep"), lambda e: e.pause_scheduler(mode="keep")])
def test_a_pause_that_keeps_is_told_before_it_begins(patched, call):
    """Once, without waiting for an answer, whichever engine it is."""
    for kind, answer, own in (
        (EngineCore, "paused", ("keep", True)),
        (EngineCoreProc, "will pause", ("in a process", "keep")),
        (Derived, "will pause", ("in a process", "keep")),
    ):
        engine = kind()
        assert call(engine) == answer
        assert engine.calls == [TOLD, own]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_other_pauses_are_told_by_their_steps(patched, mode):
    """They end or go on with what is under way, step by step."""
    engine = EngineCore()
    engine.pause_scheduler(mode, clear_cache=False)
    assert engine.calls == [(mode, False)]


def test_workers_that_cannot_be_told_hinder_no_pause(patched, caplog):
    """What goes wrong is a line."""
    engine = EngineCore(error=RuntimeError("no workers"))
    assert engine.pause_scheduler("keep") == "paused"
    assert "no workers" in caplog.text


def test_vllms_own_engines_are_found():
    """The module of the installed release has both kinds, and an executor whose call takes what we give it."""
    import inspect

    import vllm.v1.engine.core as core
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu_worker import Worker

    owners = {graft.owner.__name__ for graft in pause.grafts(core)}
    assert {"EngineCore", "EngineCoreProc"} <= owners
    assert "non_block" in inspect.signature(Executor.collective_rpc).parameters
    assert callable(Worker.check_health)
