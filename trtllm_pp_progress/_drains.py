"""Eras F to H: the executor thread relays, and before a forward waits for what it has sent. That wait gets an end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._table import HandleTable

__all__ = ["Drains"]

logger = logging.getLogger("trtllm_pp_progress")

STEP = 10.0
STEPS = 5  # then patience is about a pause, and comes back in as many waits


class Drains:
    """The waits before a forward, of one executor: each ends when the slot is clear or its patience is over.

    Upstream waits without an end, and on four ranks or more its receiver may be unable to come before we go on
    (NVIDIA/TensorRT-LLM#18135). A send that outlasts the patience stays in its slot, pending and driven by the relay
    thread; nothing is given up. Each wait in a row that is over in vain leaves a tenth of the patience to the next,
    each other one gives it back, so that a pipeline which cannot drain costs little more than the first one.
    """

    def __init__(
        self,
        engine: Engine,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Begin with `patience` in seconds, also the most there ever is; infinite where nobody else drives."""
        self._engine, self._clock, self._pause = engine, clock, pause
        self._most, self._vain = patience, 0

    @property
    def patience(self) -> float:
        """How long the next wait may take, in seconds."""
        return self._most / STEP**self._vain

    def wait(self, table: HandleTable, slot: int, upstream_wait: Callable[[], Any]) -> None:
        """Return once a slot is clear, or in vain; a handle that cannot be tested gets `upstream_wait`."""
        engine, over = self._engine, None
        pauses = engine.settings.backoff()
        while not engine.progress_pp_send_handles(table, slot):
            if engine.retired or table.sends.is_left(slot, table[slot]):
                engine.wait(table, slot, upstream_wait)
                return
            over = over or self._clock() + self.patience
            if self._clock() >= over:
                if not self._vain:
                    told = (table.sends.name, slot, self._most)
                    logger.warning("%s[%d] was not received in %.1f s: going on to the next forward without it", *told)
                self._vain = min(self._vain + 1, STEPS)
                return
            self._pause(next(pauses))
        if over is not None:
            self._vain = max(self._vain - 1, 0)
