"""What operators are told: one line each, which names rank, table, slot, peer and age."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress._table import Abandoned

__all__ = ["Messages", "be_heard"]

logger = logging.getLogger("trtllm_pp_progress")


def be_heard() -> None:
    """Have what is logged, INFO included, written to stderr as long as the program has not set logging up itself."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("trtllm-pp-progress, pid %(process)d: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class Messages:
    """Says what happened to the sends of one executor; `identify` returns its rank and the rank it sends to."""

    def __init__(self, identify: Callable[[], tuple[Any, Any]]) -> None:
        self.identify = identify
        self._said: set[str] = set()

    def left(self, table: str, slot: int, error: Exception, once_for: str) -> None:
        """Say, once for each text `once_for`, that a handle is left to upstream."""
        if once_for not in self._said:
            self._said.add(once_for)
            logger.warning("rank %s: %s[%d] is left to upstream's own wait: %r", self.identify()[0], table, slot, error)

    def stalled(self, table: str, slot: int, age_s: float) -> None:
        """Say that a send is pending for long."""
        rank, peer = self.identify()
        logger.warning("rank %s: the send in %s[%d] to rank %s is pending for %.1f s", rank, table, slot, peer, age_s)

    def silent(self, times: int, longest_s: float, reason: str) -> None:
        """Say, the first time and every tenfold, that nobody drove for a while."""
        if times in (10**power for power in range(9)):
            told = (self.identify()[0], times, longest_s, reason)
            logger.warning("rank %s: nobody drove pending sends, %d times, up to %.3f s (no second driver: %s)", *told)

    def dropped(self, table: str, slot: int, error: Exception) -> None:
        """Say that a broken send was dropped, as the executor is closing."""
        logger.error("rank %s: %s[%d] failed while closing, dropped: %r", self.identify()[0], table, slot, error)

    def abandoned(self, kept: Abandoned) -> None:
        """Say that a send was given up at the deadline."""
        told = (kept.rank, kept.table, kept.slot, kept.peer, kept.age_s)
        logger.error(
            "rank %s: abandoned the send in %s[%d] to rank %s after %.1f s (request and buffer are kept)", *told
        )
