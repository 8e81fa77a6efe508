"""What a stage asks of its device: a stream, marks in time, a captured step. A CPU answers in the GPU's shapes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Cpu", "Cuda", "device_for"]

# How to run the step again, where it leaves its output, and how many seconds its computation took the last time.
Captured = tuple[Callable[[], object], torch.Tensor, Callable[[], float]]


class Cpu:
    """Everything at once and in order: a mark is the time, an event is over, a captured step is called again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self) -> None:
        """Set the clock that marks are told in."""

    def stream(self) -> Any:
        """Return the context in which the device thread works."""
        return contextlib.nullcontext()

    def staging(self, *shape: int) -> torch.Tensor:
        """Return whole numbers on the host, from and to which copies need not be waited for."""
        return torch.zeros(*shape, dtype=torch.long)

    def mark(self) -> Any:
        """Return a mark of this moment in the stream."""
        return time.monotonic()

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return when the stream passed the marks, on the host's monotonic clock."""
        return list(marks)

    def event(self) -> Callable[[], object]:
        """Return a function that waits until the stream has come as far as now."""
        return lambda: None

    def capture(self, step: Callable[[], torch.Tensor]) -> Captured:
        """Run a step once and return how to run it again with what its inputs hold then."""
        output, took = step().clone(), 0.0

        def run() -> None:
            nonlocal took
            begun = time.monotonic()
            output.copy_(step())
            took = time.monotonic() - begun

        return run, output, lambda: took


class Cuda:
    """One stream of a GPU; captured steps are CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        with self.stream():
            self._base = self.mark()
        self._base.synchronize()
        self._base_s = time.monotonic()

    @contextlib.contextmanager
    def stream(self) -> Any:
        torch.cuda.set_device(self.device)  # of this thread
        with torch.cuda.stream(self._stream):
            yield

    def staging(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.long, pin_memory=True)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        torch.cuda.synchronize(self.device)
        return [self._base_s + self._base.elapsed_time(mark) * 1e-3 for mark in marks]

    def event(self) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def capture(self, step: Callable[[], torch.Tensor]) -> Captured:
        step()  # libraries set themselves up outside of a capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Inside the graph, so that a host that is late between two launches does not count.
        begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        # Other threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            begin.record()
            output = step()
            end.record()
        return graph.replay, output, lambda: begin.elapsed_time(end) * 1e-3


def device_for(device: torch.device) -> Cpu | Cuda:
    """Return the one for a torch device."""
    return Cuda(device) if device.type == "cuda" else Cpu(device)
