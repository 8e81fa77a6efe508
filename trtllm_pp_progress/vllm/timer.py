"""Times spans of GPU streams without ever waiting for the GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["StreamTimer"]

BATCH = 16  # spans that are left open until they are looked at


class Event(Protocol):
    """The part of torch.cuda.Event that a timer uses."""

    def record(self, stream: Any) -> None:
        """Mark the stream's present end."""

    def query(self) -> bool:
        """Say whether the mark has passed."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds between two marks that have passed."""


class StreamTimer:
    """Adds up spans between pairs of events; a pair is read once its end has passed, later and in passing.

    Never synchronises, and never holds more than `limit` pairs: while the GPU is that far behind, spans are dropped and
    counted as such. Events are touched by the thread that made the timer alone: asked by another, it tells what it has.
    """

    def __init__(self, new_event: Callable[[], Event], limit: int = 256) -> None:
        self.count = 0
        self.dropped = 0
        self.total_ms = 0.0
        self.longest_ms = 0.0
        self._new_event = new_event
        self._limit = limit
        self._thread = threading.get_ident()
        self._spare: list[Event] = []
        self._open: deque[tuple[Event, Event]] = deque()

    def start(self, stream: Any) -> Event:
        """Mark the start of a span at the stream's present end."""
        event = self._spare.pop() if self._spare else self._new_event()
        event.record(stream)
        return event

    def stop(self, start: Event, stream: Any) -> None:
        """Mark the end of a span, on the same stream or another."""
        if len(self._open) >= min(BATCH, self._limit):
            self.collect()
        if len(self._open) >= self._limit:
            self.dropped += 1
            self.cancel(start)
        else:
            self._open.append((start, self.start(stream)))

    def cancel(self, start: Event) -> None:
        """Forget a span that was started."""
        self._spare.append(start)

    def collect(self) -> None:
        """Read every span that has passed, oldest first."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            span = start.elapsed_time(end)
            self.count += 1
            self.total_ms += span
            self.longest_ms = max(self.longest_ms, span)
            self._spare += (start, end)

    def summary(self) -> dict[str, float]:
        """Return how many spans were read so far and how many dropped, their sum and the longest, in milliseconds."""
        if threading.get_ident() == self._thread:
            with suppress(RuntimeError):  # a GPU in error answers no queries; what was read before still counts
                self.collect()
        return {
            "count": self.count,
            "total_ms": round(self.total_ms, 3),
            "longest_ms": round(self.longest_ms, 3),
            "dropped": self.dropped,
        }
