"""Eras F to I: the executor thread relays, and before a forward waits for what it has sent. That wait gets an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.progress.table import HandleTable

__all__ = ["Drains"]

REFILL = 0.01  # of the time that passes


class Drains:
    """The waits before a forward, of one executor: each ends when the slot is clear or its patience is over.

    Upstream waits without an end, and on four ranks or more its receiver may be unable to come before we go on
    (NVIDIA/TensorRT-LLM#18135). A send that outlasts the patience stays in its slot, pending and driven; nothing is
    given up. All slots share one patience: time waited in vain is used up, and regained at 1 % of the time that
    passes, so that a pipeline which cannot drain costs little more than the first wait.
    """

    def __init__(self, engine: Engine, patience: float) -> None:
        """Begin with `patience` in seconds, also the most there ever is; infinite where nobody else drives."""
        self._engine, self._most = engine, patience
        self._left, self._since = patience, engine.clock()

    @property
    def patience(self) -> float:
        """How long the next wait may take, in seconds."""
        return min(self._most, self._left + REFILL * (self._engine.clock() - self._since))

    def wait(self, table: HandleTable, slot: int, upstream_wait: Callable[[], Any]) -> None:
        """Return once a slot is clear, or in vain; a handle that cannot be tested gets `upstream_wait`."""
        engine = self._engine
        if engine.settle(table, slot):
            return
        patience, started = self.patience, engine.clock()

        def settled() -> bool:
            return engine.settle(table, slot) or engine.is_upstreams(table, slot)

        if engine.wait_until(settled, lambda: started + patience):
            if table[slot] is not None:
                wait_for_slot(engine, table, slot, upstream_wait)
            return
        if patience == self._most:
            engine.log.in_vain(table.sends.name, slot, patience)
        self._since = engine.clock()
        self._left = max(0.0, patience - (self._since - started))
