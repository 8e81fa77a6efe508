"""The pipeline without MPI: one process a stage, this one as the scheduler; proves tokens, measures stages.

    python -m decoder.selfcheck --model smollm2 --stages 4 --in-flight 4 --tokens 24

prints the time of each stage and of the unsplit model, and exits 1 if a token differs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from decoder.convert import prepare
from decoder.spec import ModelError, Spec, cut

__all__ = ["Host", "Pipeline", "Request"]

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Why is the sky blue? Answer briefly.",
)
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
            process = context.Process(target=_serve, args=(there, rank, stages), daemon=True)
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


def _serve(link: Connection, rank: int, stages: int) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the pipeline with the unsplit model and print timings; 0 if equal, 1 if not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="decoder.selfcheck", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, qwen3-random:SIZE or a checkpoint directory")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=1, help="microbatches under way")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--payload", default="logits", help="none, logits, or a size in bytes")
    options = parser.parse_args(arguments)
    try:
        spec = prepare(options.model)
        cut(spec, options.stages)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from decoder.reference import generate, load
    from decoder.text import Text

    text = Text(spec)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    whole = load(spec, dtype=options.dtype)
    generate(whole, prompts[:1], 2)
    began = time.perf_counter()
    expected = generate(whole, prompts, options.tokens)
    unsplit_ms = 1e3 * (time.perf_counter() - began) / options.tokens / len(prompts)
    del whole
    with Pipeline(options.stages) as pipeline:
        pipeline.open(spec, dtype=options.dtype, payload=options.payload)
        pipeline.run(prompts[:1], 2)
        began = time.perf_counter()
        requests = pipeline.run(prompts, options.tokens, in_flight=options.in_flight)
        split_ms = 1e3 * (time.perf_counter() - began) / options.tokens / len(prompts)
        figures = pipeline.figures()
    for prompt, request in zip(PROMPTS, requests, strict=True):
        print(f"{prompt} -> {text.decode(request.tokens)}")
    print(f"unsplit {unsplit_ms:.1f} ms a token, {options.stages} stages {split_ms:.1f} ms a token")
    for rank, figure in enumerate(figures):
        print(f"stage {rank}: {figure['layers']} layers, {figure['step_ms']:.2f} ms, {figure['peak_mb']:.0f} MB peak")
    equal = expected == [request.tokens for request in requests]
    print(f"tokens {'equal' if equal else 'DIFFER'}, wrong payloads {pipeline.wrong}")
    return int(not equal or pipeline.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
