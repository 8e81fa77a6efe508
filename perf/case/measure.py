"""Run one relay once through upstream's loop, on every rank, and bring what was noted together on rank 0."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import trtllm_pp_progress
from case.loop import UpstreamLoop, record_drives
from case.names import is_patched
from case.record import Notes, RecordedDist
from case.relays import relay_class
from trtllm_pp_progress.tools.bench.measure import clean_up_at_rest
from trtllm_pp_progress.tools.host import Request

__all__ = ["Load", "RankNotes", "Run", "abort_on_thread_errors", "groups", "run"]

WARMUP_TOKENS = 6  # of each request in the first wave: connections, graphs and caches are there afterwards


@dataclass(frozen=True)
class Load:
    """What is asked of the pipeline: `prompts` in order, `tokens` each, `in_flight` at once in batches of `batch`."""

    prompts: Sequence[Sequence[int]]
    tokens: int
    in_flight: int
    batch: int
    host_work_s: float = 0.0
    hold_gil: bool = False
    deadline_s: float = 300.0


@dataclass
class RankNotes:
    """One rank's notes of one run; `spans` is start, end and whether it decodes, by step, and all times are seconds."""

    notes: Notes
    spans: dict[int, tuple[float, float, bool]]
    kernels_s: list[float]
    reentry_s: float
    cpu_cores: float
    polls: int
    steps: int
    wrong: int


@dataclass
class Run:
    """One run of one policy: the timed window (monotonic seconds), its tokens by request, and every rank's notes."""

    policy: str
    window: tuple[float, float]
    tokens: list[list[int]]
    payload_bytes: int = 0
    ranks: list[RankNotes] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole window, prompts included, as upstream counts."""
        return sum(map(len, self.tokens)) / (self.window[1] - self.window[0])


def groups(concurrency: int, pp: int) -> int:
    """Return the batch size that lets `concurrency` requests fill `pp` stages with equal batches."""
    most = -(-concurrency // pp)
    return max(size for size in range(1, most + 1) if concurrency % size == 0)


def abort_on_thread_errors(comm: Any) -> None:
    """Let an error in any thread end the job: the other ranks would wait for this one for ever."""

    def hook(arguments: Any) -> None:
        traceback.print_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        if comm.Get_size() > 1:
            comm.Abort(1)

    threading.excepthook = hook


def run(comm: Any, policy: str, stage: Any, load: Load) -> Run | None:
    """Run a load with one policy; collective, returns on rank 0 only. The stage is used again by the next run."""
    patched, cls = is_patched(policy), relay_class(policy)
    with trtllm_pp_progress.install(cls) if patched else contextlib.nullcontext():
        dist = RecordedDist(comm)
        stage.begin()
        cpu: list[tuple[float, float]] = []
        executor = cls(
            dist,
            stage,
            max_batch_size=load.batch,
            after_forward=lambda: cpu.append((time.monotonic(), time.process_time())),
        )
        executor.host_work_s, executor.hold_gil = load.host_work_s, load.hold_gil
        comm.Barrier()
        executor.start_worker()
        clean_up_at_rest(executor)
        record_drives(executor)
        window, tokens = (0.0, 0.0), [[0]]
        if dist.is_first_pp_rank:
            warm = Load(load.prompts[: load.in_flight], min(WARMUP_TOKENS, load.tokens), load.in_flight, load.batch)
            _drive(executor, 0, warm)
            begun = time.monotonic()
            tokens = _drive(executor, load.in_flight, load)
            window = (begun, time.monotonic())
        executor.shutdown()
        executor.raise_error()
        status = trtllm_pp_progress.status() if patched else {}
        ranks = comm.gather(_rank(executor, stage, cpu, status))
    return Run(policy, window, tokens, executor.payload_bytes, ranks) if dist.is_first_pp_rank else None


def _drive(executor: UpstreamLoop, first_id: int, load: Load) -> list[list[int]]:
    """Keep `in_flight` requests going, a batch finished and a batch added at a time; return tokens by request."""
    requests = [Request(first_id + i, prompt, load.tokens) for i, prompt in enumerate(load.prompts)]
    waiting, done = list(requests), []
    executor.enqueue_requests(waiting[: load.in_flight])
    del waiting[: load.in_flight]
    while len(done) < len(requests):
        arrived = executor.await_responses(min(load.batch, len(requests) - len(done)), load.deadline_s)
        done += arrived
        if waiting:
            executor.enqueue_requests(waiting[: len(arrived)])
            del waiting[: len(arrived)]
    return [request.tokens for request in sorted(done, key=lambda request: request.request_id)]


def _rank(executor: UpstreamLoop, stage: Any, cpu: list[tuple[float, float]], status: dict[str, Any]) -> RankNotes:
    polls = getattr(executor, "polls", 0)
    for installed in status.get("installed", []):
        for engine in installed["executors"]:
            polls += sum(table["polls"] for table in engine["tables"].values())
    (t0, cpu0), (t1, cpu1) = cpu[0], cpu[-1]
    entries = executor.dist.entries
    gaps = [b - a for a, b in pairwise(entries)]
    return RankNotes(
        notes=executor.dist.notes,
        spans=stage.spans(),
        kernels_s=stage.kernels_s,
        reentry_s=statistics.median(gaps) if gaps else 0.0,
        cpu_cores=(cpu1 - cpu0) / (t1 - t0) if t1 > t0 else 0.0,
        polls=polls,
        steps=executor.steps,
        wrong=executor.wrong,
    )
