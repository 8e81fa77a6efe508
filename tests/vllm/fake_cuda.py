"""CUDA streams and events on a CPU: a stream is a list of collectives under way, an event a snapshot of it.

As with NCCL, a broadcast returns to the host at once and whoever waits for an event waits for what was on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

PATIENCE = timedelta(seconds=20)


def wait(work: Any, share: float = 1.0) -> None:
    """Wait for a collective or a message, but not for ever; TimeoutError where it fails or does not end."""
    try:
        work.wait(PATIENCE * share)
    except RuntimeError as error:
        raise TimeoutError(f"a collective did not end: {error}") from None


class Event:
    """What was on a stream when it was recorded; covers nothing before that, like a CUDA event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.works: list[Any] = []

    def record(self, stream: Stream) -> None:
        self.works = list(stream.works)

    def query(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, stream: Stream | None = None) -> None:
        for work in self.works:
            wait(work)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Stream:
    """Collectives in the order in which they were issued."""

    def __init__(self, device: Any = None) -> None:
        self.works: list[Any] = []

    def record_event(self) -> Event:
        self.works = [work for work in self.works if not work.is_completed()]
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Wait for nothing: compute is synchronous here, and collectives are ordered by themselves."""

    def query(self) -> bool:
        return all(work.is_completed() for work in list(self.works))

    def synchronize(self) -> None:
        for work in self.works:
            wait(work)
        self.works = []


class Cuda:
    """Installs the fakes into torch, and keeps a log of every broadcast that was really issued."""

    def __init__(self, blocking: bool = False) -> None:
        self.main = self.current = Stream()
        self.collectives: list[tuple[tuple[int, ...], str]] = []
        self._blocking = blocking
        self._broadcast: Callable[..., Any] = torch.distributed.broadcast

    def install(self) -> None:
        torch.cuda.Stream = Stream
        torch.cuda.Event = Event
        torch.cuda.current_stream = lambda device=None: self.current
        torch.cuda.stream = self._use
        torch.Tensor.record_stream = lambda tensor, stream: None
        torch.distributed.broadcast = self._issue

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _issue(self, tensor: torch.Tensor, src: int, group: Any) -> None:
        self.collectives.append((tuple(tensor.shape), str(tensor.dtype)))
        work = self._broadcast(tensor, src=src, group=group, async_op=not self._blocking)
        if work is not None:
            self.current.works.append(work)
