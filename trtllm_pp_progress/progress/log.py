"""What operators are told: one line each, which names rank, table, slot, peer and age."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Log", "be_heard"]

logger = logging.getLogger("trtllm_pp_progress")

Identify = Callable[[], tuple[Any, Any]]


def be_heard() -> None:
    """Have what is logged, INFO included, written to stderr as long as the program has not set logging up itself."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("trtllm-pp-progress, pid %(process)d: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class Log:
    """Says what happened to the sends of one executor; `identify` returns its rank and the rank it sends to.

    What may happen again and again is said the first time and every tenfold, for each table and kind of error: texts
    that differ each time are neither printed nor remembered.
    """

    def __init__(self, identify: Identify = lambda: (None, None)) -> None:
        self.identify = identify
        self._times: dict[tuple[str, ...], int] = {}

    def left(self, table: str, slot: int, error: Exception) -> None:
        """Say that a handle is left to upstream's own wait."""
        if times := self._due("left", table, type(error).__name__):
            rank, peer = self.identify()
            text = "rank %s: the send in %s[%d] to rank %s is left to upstream's own wait (%s): %s"
            logger.warning(text, rank, table, slot, peer, times, _told(error))

    def stalled(self, table: str, slot: int, age_s: float) -> None:
        """Say that a send is pending for long."""
        rank, peer = self.identify()
        logger.warning("rank %s: the send in %s[%d] to rank %s is pending for %.1f s", rank, table, slot, peer, age_s)

    def silent(self, times: int, longest_s: float, reason: str) -> None:
        """Say that nobody drove for a while."""
        if self._due("silent"):
            text = "rank %s: nobody drove pending sends, %d times, up to %.3f s (no native driver: %s)"
            logger.warning(text, self.identify()[0], times, longest_s, reason)

    def in_vain(self, table: str, slot: int, patience_s: float) -> None:
        """Say that a drain before a forward went on without its send."""
        if self._due("in vain", table):
            rank, peer = self.identify()
            text = "rank %s: the send in %s[%d] to rank %s was not received in %.1f s: the next forward goes without it"
            logger.warning(text, rank, table, slot, peer, patience_s)

    def dropped(self, table: str, slot: int, error: Exception) -> None:
        """Say that a broken send was dropped, as the executor is closing."""
        if times := self._due("dropped", table, type(error).__name__):
            rank, peer = self.identify()
            text = "rank %s: the send in %s[%d] to rank %s failed while closing (%s), lost: %s"
            logger.error(text, rank, table, slot, peer, times, _told(error))

    def abandoned(self, rank: Any, table: str, slot: int, peer: Any, age_s: float) -> None:
        """Say that the wait for a send ended at the deadline."""
        text = "rank %s: abandoned the send in %s[%d] to rank %s after %.1f s (it stays alive and driven)"
        logger.error(text, rank, table, slot, peer, age_s)

    def _due(self, *what: str) -> str:
        """Return how often it has happened by now, in words, the first time and every tenfold; else nothing."""
        times = self._times[what] = self._times.get(what, 0) + 1
        return f"{times} times so far" if times in (10**power for power in range(9)) else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"  # a repr hides what MPI says
