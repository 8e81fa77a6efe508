"""One stage in a process of its own, served over a pipe: the executor's side of a stage, without MPI."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from decoder.spec import Spec

__all__ = ["ANSWER_S", "Host", "Request", "serve"]

ANSWER_S = 120.0  # longest wait for any one answer of a stage
POLL_S = 0.01  # the stage's receive times out and is asked again, as the executor does between two MPI calls


@dataclass
class Request:
    """The executor's request, as far as a stage looks at it."""

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class Host:
    """The executor's sample state, as far as a stage looks at it."""

    new_tokens: list[int]
    payload: bytes = b""
    step: int = 0


class _Server:
    """What one process does: one method a command, named like it; a value other than None is the answer."""

    def __init__(self, rank: int, stages: int) -> None:
        self.rank, self.stages = rank, stages
        self.stage: Any = None
        self.rendezvous: Any = None
        self.requests: dict[int, Request] = {}
        self.wrong = 0
        self.steps_s: list[float] = []

    def close(self) -> bool:
        if self.stage is not None:
            self.stage.close()
        self.stage = self.rendezvous = None
        self.requests.clear()
        self.steps_s.clear()
        return True

    def listen(self) -> str:
        from decoder.wire import Rendezvous

        self.rendezvous = Rendezvous()
        return str(self.rendezvous.address)

    def build(self, spec: Spec, address: str, options: dict[str, Any]) -> bool:
        from decoder.stages import build

        self.stage = build(spec, self.rank, self.stages, address, make_host=Host, **options)
        return True

    def step(self, batch: list[tuple[int, list[int], int]], sampled: list[tuple[list[int], Host]]) -> Host | None:
        deadline = time.monotonic() + ANSWER_S
        while not self.stage.receive(POLL_S):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no activation within {ANSWER_S:g} s")
        self._handle(sampled)
        requests = [self.requests.setdefault(fields[0], Request(*fields)) for fields in batch]
        began = time.perf_counter()
        host: Host | None = self.stage.forward(requests)
        if requests[0].computed:
            self.steps_s.append(time.perf_counter() - began)
        for request in requests:
            request.computed += 1 if request.computed else len(request.prompt)
        return host

    def handle(self, sampled: list[tuple[list[int], Host]]) -> int:
        self._handle(sampled)
        wrong, self.wrong = self.wrong, 0
        return wrong

    def _handle(self, sampled: list[tuple[list[int], Host]]) -> None:
        for request_ids, host in sampled:
            self.wrong += self.stage.check(host)
            for request_id, token in zip(request_ids, host.new_tokens, strict=True):
                request = self.requests[request_id]
                request.tokens.append(token)
                if len(request.tokens) >= request.max_tokens:
                    del self.requests[request_id]
                    self.stage.release(request)

    def figures(self) -> dict[str, float]:
        return {
            "step_ms": 1e3 * statistics.median(self.steps_s or [0.0]),
            "layers": len(self.stage.model.layers),
            "peak_mb": _peak_mb(),
            "cached": len(self.stage.model.caches),
        }


def _peak_mb() -> float:
    """Return the most memory this process has had resident; rusage would count its parent's."""
    status = Path("/proc/self/status").read_text()
    return float(status.partition("VmHWM:")[2].split()[0]) / 1024


def serve(link: Connection, rank: int, stages: int) -> None:
    server = _Server(rank, stages)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread reads, so that the scheduler never blocks in send while this process blocks in its own: payloads are
    # larger than a pipe holds.
    threading.Thread(target=_read, args=(link, commands), daemon=True).start()
    while (message := commands.get()) is not None:
        command, *arguments = message
        try:
            answer = getattr(server, command)(*arguments)
        except Exception as error:
            with contextlib.suppress(OSError):  # the scheduler has gone, with an error of its own
                link.send((True, f"{type(error).__name__}: {error}"))
        else:
            if answer is not None:
                link.send((False, answer))
    server.close()


def _read(link: Connection, commands: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            commands.put(link.recv())
    except (EOFError, OSError):  # the scheduler has closed the link
        commands.put(None)
