"""The pipeline without MPI: one process a stage, this one as the scheduler."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from decoder.serve import ANSWER_S, Host, Request, serve
from decoder.spec import Spec

__all__ = ["Pipeline"]


class Pipeline:
    """Processes that each serve a stage: `open` a model, `run` prompts through it, `open` the next; a context manager.

    A stage's error is raised here as RuntimeError with its text; no answer within two minutes is a TimeoutError.
    Leaving the context ends every process; `exitcodes` then tells how (0: closed cleanly).
    """

    def __init__(self, stages: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(stages):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, stages), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)
        self._inbox: dict[Connection, deque[Any]] = {link: deque() for link in self._links}
        self.exitcodes: list[int | None] = []
        self.wrong = 0

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for link in self._links:
            link.close()  # ends the loop that serves it
        for process in self._processes:
            process.join(60)
            if process.exitcode is None:
                process.kill()
                process.join()
            self.exitcodes.append(process.exitcode)

    def open(self, specs: Spec | Sequence[Spec], **options: Any) -> None:
        """Close what is open and build every stage of a model (or each of its own); `options` are those of `build`."""
        self._all("close")
        self._links[0].send(("listen",))
        address = self._answer(self._links[0])
        each = [specs] * len(self._links) if isinstance(specs, Spec) else specs
        for link, spec in zip(self._links, each, strict=True):
            link.send(("build", spec, address, options))
        for link in self._links:
            self._answer(link)

    def run(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, in_flight: int = 1, batch: int = 1
    ) -> list[Request]:
        """Generate `tokens` for each prompt with up to `in_flight` microbatches of `batch` requests under way.

        As in the executor, each schedule announces the sampled batches to handle first. Adds the payloads that any
        rank but the last found wrong to `wrong`.
        """
        requests = [Request(number, prompt, tokens) for number, prompt in enumerate(prompts)]
        waiting = deque(requests[low : low + batch] for low in range(0, len(requests), batch))
        under_way: deque[list[Request]] = deque()
        sampled: list[tuple[list[int], Host]] = []
        while waiting or under_way:
            while waiting and len(under_way) < in_flight:
                under_way.append(waiting.popleft())
                self._send_all("step", [(r.request_id, r.prompt, r.max_tokens) for r in under_way[-1]], sampled)
                sampled = []
            host = self._answer(self._links[-1])
            microbatch = under_way.popleft()
            for request, token in zip(microbatch, host.new_tokens, strict=True):
                request.tokens.append(token)
            sampled.append(([request.request_id for request in microbatch], host))
            if len(microbatch[0].tokens) < tokens:
                waiting.append(microbatch)
        self.wrong += sum(self._all("handle", sampled)[:-1])
        return requests

    def figures(self) -> list[dict[str, float]]:
        """Return for each stage its decode step (median ms since it was built), layers and peak memory (MB)."""
        return self._all("figures")

    def _send_all(self, *message: Any) -> None:
        for link in self._links:
            link.send(message)

    def _all(self, *message: Any) -> list[Any]:
        self._send_all(*message)
        return [self._answer(link) for link in self._links]

    def _answer(self, link: Connection) -> Any:
        """Return the next answer of one stage; an error of any stage is raised as soon as it comes."""
        deadline = time.monotonic() + ANSWER_S
        while not self._inbox[link]:
            ready = wait(self._links, deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"stage {self._links.index(link)} did not answer within {ANSWER_S:g} s")
            for other in self._links:
                if other in ready:
                    try:
                        failed, value = other.recv()
                    except EOFError:
                        raise RuntimeError(f"the process of stage {self._links.index(other)} has died") from None
                    if failed:
                        raise RuntimeError(f"stage {self._links.index(other)}: {value}")
                    self._inbox[other].append(value)
        return self._inbox[link].popleft()
