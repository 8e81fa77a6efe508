"""Run one policy once, on every rank, and bring the figures together."""

from __future__ import annotations

import bisect
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import trtllm_pp_progress
from trtllm_pp_progress.bench._scenarios import PATCHED, executor_class
from trtllm_pp_progress.host import Dist, HostExecutor, Request, Stage

__all__ = ["Outcome", "Rank", "Row", "interleaved", "row", "run"]

WARMUP_TOKENS = 5  # by request: untimed, and the estimate of how many tokens fit into the time
MIN_STEPS = 10
DEADLINE_S = 300.0


@dataclass
class Rank:
    """What one rank measured in one run: times in milliseconds."""

    parked_ms: list[float]
    polls: int
    steps: int
    cpu_cores: float
    reentry_ms: float
    wrong: int


@dataclass
class Outcome:
    """One run of one policy; tokens by request are rank 0's."""

    tokens_per_s: float
    tokens: list[list[int]]
    ranks: list[Rank]
    payload_bytes: int = 0  # of one sample state


@dataclass
class Row:
    """Medians over the runs of one policy in one scenario, latency reduced by maximum over ranks."""

    scenario: str
    policy: str
    pp: int
    payload_bytes: int
    tokens_per_s: float
    parked_ms_p50: float
    parked_ms_p99: float
    parked_ms_max: float
    polls_per_step: float
    cpu_cores: float
    wrong: int
    reentry_ms: list[float]
    raw: list[dict[str, Any]]


def run(
    comm: Any,
    policy: str,
    make_stage: Callable[[], Stage],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    concurrency: int | None = None,
    max_seconds: float | None = None,
    **executor_arguments: Any,
) -> Outcome | None:
    """Run `prompts` through one policy's executor, `max_tokens` each; collective, returns on rank 0 only.

    `concurrency` of them at once (default: all). With `max_seconds` fewer tokens are timed where they would take
    longer. While tokens are timed, no other thread of any rank is inside MPI: it would make the sends progress that the
    policy leaves alone.
    """
    patch = trtllm_pp_progress.install(HostExecutor) if policy == PATCHED else contextlib.nullcontext()
    with patch:
        dist = Dist()
        stage = make_stage()
        marks: list[tuple[float, float]] = []
        executor = executor_class(policy)(
            dist,
            stage,
            after_forward=lambda: marks.append((time.monotonic(), time.process_time())),
            **executor_arguments,
        )
        executor.start_worker()
        tokens_per_s, tokens = 0.0, [[0]]
        if dist.is_first_pp_rank:
            tokens_per_s, tokens = _drive(executor, prompts, max_tokens, concurrency or len(prompts), max_seconds)
            # The relay of some eras hangs if it is shut down with its last send in flight; that is tested elsewhere.
            time.sleep(2 * (executor.reentry_s or 0) + 0.05)
        executor.shutdown()
        status = trtllm_pp_progress.status() if policy == PATCHED else {}
        warm = WARMUP_TOKENS * len(prompts)
        ranks = comm.gather(_rank(executor, marks, warm, status))
        stage.close()
    return Outcome(tokens_per_s, tokens, ranks, executor.payload_bytes) if dist.is_first_pp_rank else None


def interleaved(
    policies: Sequence[str], repeat: int, run_once: Callable[[str], Outcome | None], say: Callable[[str], object]
) -> dict[str, list[Outcome]]:
    """Run every policy in turn, `repeat` times over, so that all meet the same machine; outcomes are rank 0's."""
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
    for repetition in range(repeat):
        for policy in policies:
            if (outcome := run_once(policy)) is not None:
                outcomes[policy].append(outcome)
                say(f"{repetition + 1}/{repeat} {policy}: {outcome.tokens_per_s:.2f} tokens/s")
    return outcomes


def _drive(
    executor: HostExecutor,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    concurrency: int,
    max_seconds: float | None,
) -> tuple[float, list[list[int]]]:
    def generate(first_id: int, count: int) -> list[Request]:
        requests = [Request(first_id + i, prompt, count) for i, prompt in enumerate(prompts)]
        done: list[Request] = []
        for start in range(0, len(requests), concurrency):
            together = requests[start : start + concurrency]
            executor.enqueue_requests(together)
            done += executor.await_responses(len(together), DEADLINE_S)
        return done

    started = time.perf_counter()
    generate(0, WARMUP_TOKENS)
    if max_seconds is not None:
        rate = WARMUP_TOKENS / (time.perf_counter() - started)
        max_tokens = max(MIN_STEPS, min(max_tokens, round(max_seconds * rate)))
    started = time.perf_counter()
    done = generate(len(prompts), max_tokens)
    elapsed = time.perf_counter() - started
    ordered = sorted(done, key=lambda request: request.request_id)
    return max_tokens * len(prompts) / elapsed, [request.tokens for request in ordered]


def _rank(executor: HostExecutor, marks: list[tuple[float, float]], warm: int, status: dict[str, Any]) -> Rank:
    polls = getattr(executor, "polls", 0)
    for installed in status.get("installed", []):
        for engine in installed["executors"]:
            polls += sum(table["polls"] for table in engine["tables"].values())
    timed = marks[warm:]
    (t0, cpu0), (t1, cpu1) = timed[0], timed[-1]
    return Rank(
        parked_ms=[round(parked * 1e3, 4) for parked in executor.parked_s[warm:]],
        polls=polls,
        steps=executor.steps,
        cpu_cores=(cpu1 - cpu0) / (t1 - t0),
        reentry_ms=_reentry([t for t, _ in timed], executor.dist.entries) * 1e3,
        wrong=executor.wrong,
    )


def _reentry(steps: list[float], entries: list[float]) -> float:
    """Return the median over steps of the longest time the executor thread stayed outside MPI, in seconds."""
    longest = []
    for start, end in pairwise(steps):
        first, last = bisect.bisect_left(entries, start), bisect.bisect_right(entries, end)
        moments = [start, *entries[first:last], end]
        longest.append(max(b - a for a, b in pairwise(moments)))
    return statistics.median(longest) if longest else 0.0


def row(scenario: str, policy: str, payload_bytes: int, outcomes: Sequence[Outcome]) -> Row:
    """Reduce the runs of one policy in one scenario to a row."""

    def worst(quantile: float) -> float:
        return statistics.median(max(_quantile(rank.parked_ms, quantile) for rank in o.ranks) for o in outcomes)

    first = outcomes[0]
    return Row(
        scenario=scenario,
        policy=policy,
        pp=len(first.ranks),
        payload_bytes=payload_bytes,
        tokens_per_s=statistics.median(o.tokens_per_s for o in outcomes),
        parked_ms_p50=worst(0.5),
        parked_ms_p99=worst(0.99),
        parked_ms_max=max(_quantile(rank.parked_ms, 1.0) for o in outcomes for rank in o.ranks),
        polls_per_step=statistics.median(max(rank.polls / rank.steps for rank in o.ranks) for o in outcomes),
        cpu_cores=statistics.median(statistics.mean(rank.cpu_cores for rank in o.ranks) for o in outcomes),
        wrong=sum(rank.wrong for o in outcomes for rank in o.ranks),
        reentry_ms=[statistics.median(o.ranks[i].reentry_ms for o in outcomes) for i in range(len(first.ranks))],
        raw=[{"tokens_per_s": o.tokens_per_s, "ranks": [asdict(rank) for rank in o.ranks]} for o in outcomes],
    )


def _quantile(values: Sequence[float], quantile: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0
