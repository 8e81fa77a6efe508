"""Eras H and I: between two ticks of upstream's own pump, the relay's idle wait is the progress engine's turn."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue

__all__ = ["TICK_S", "PumpedQueue"]

TICK_S = 0.04  # well below the 0.1 s that upstream's exit hook gives the relay to notice its stop


class PumpedQueue(RelayQueue):
    """The relay's queue under upstream's get_with_mpi_progress, which gets with a time-out and ticks at its end.

    Until then a pending send is driven as in any other era. Upstream's tick stays, for what no handle table holds, and
    so do its stop and quiesced events and its exit hook. It comes no sooner than every `shortest` seconds: as sends are
    driven already, upstream's 5 ms are CPU time for nothing. Once `stopped()` is true, or where the pump is off and
    upstream gets without a time-out, the relay thread keeps out of MPI while it idles.
    """

    def __init__(
        self,
        engine: Engine,
        maxsize: int,
        stopped: Callable[[], bool],
        shortest: float = 0.0,
        inline: bool = False,
    ) -> None:
        super().__init__(engine, maxsize, inline, self._wait_until_tick)
        self._stopped, self._shortest = stopped, shortest
        self._tick = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item, driving pending sends; queue.Empty when the tick is due."""
        if block and timeout is not None and not self._stopped():
            self._tick = time.monotonic() + max(timeout, self._shortest)
            return super().get()
        if block:
            self._engine.driver.stop()
        item = queue.Queue.get(self, block, timeout)
        if item is None:
            self._engine.let_go()
        return item

    def _wait_until_tick(self, condition: threading.Condition, timeout: float | None) -> None:
        left = self._tick - time.monotonic()
        if left <= 0:
            raise queue.Empty
        condition.wait(left if timeout is None else min(left, timeout))
