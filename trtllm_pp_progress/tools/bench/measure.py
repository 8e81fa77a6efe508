"""Run one policy once, on every rank, and bring the samples together."""

from __future__ import annotations

import bisect
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

from trtllm_pp_progress.installation.install import install, status
from trtllm_pp_progress.tools.bench.hindrances import PostingDist, exchange, hold_gil
from trtllm_pp_progress.tools.bench.rows import Outcome, Rank
from trtllm_pp_progress.tools.bench.scenarios import PATCHED
from trtllm_pp_progress.tools.host import POLICIES, Dist, HostExecutor, Request, Stage
from trtllm_pp_progress.tools.job.clock import PreviousClock, read_previous

__all__ = ["clean_up_at_rest", "interleaved", "run"]

WARMUP_TOKENS = 5  # by request: untimed, and the estimate of how many tokens fit into the time
MIN_STEPS = 10
DEADLINE_S = 300.0

Marks = list[tuple[float, float]]  # monotonic clock and CPU time, in seconds
Generated = tuple[float, list[list[int]]]  # tokens/s, and the tokens by request


def run(
    comm: Any,
    policy: str,
    make_stage: Callable[[], Stage],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    concurrency: int | None = None,
    max_seconds: float | None = None,
    hold_s: float = 0.0,
    busy: bool = False,
    settings: Mapping[str, Any] | None = None,
    executor_class: type[HostExecutor] | None = None,
    **executor_arguments: Any,
) -> Outcome | None:
    """Run `prompts` through one policy's executor, `max_tokens` each; collective, returns on rank 0 only.

    `concurrency` of them at once (default: all). With `max_seconds` fewer tokens are timed where they would take
    longer. While tokens are timed, no other thread of any rank is inside MPI: it would make the sends progress that the
    policy leaves alone. Two exceptions, each a scenario: with `hold_s` this rank's executor thread holds the GIL for so
    long once its relay has posted; with `busy` the main threads exchange small messages.

    `settings` are the patch's (default: the environment's); `executor_class` stands for the policy's own.
    """
    cls = executor_class or POLICIES.get(policy, HostExecutor)
    with install(cls, **(settings or {})) if policy == PATCHED else contextlib.nullcontext():
        executor, marks = _executor(cls, make_stage(), hold_s, executor_arguments)
        beside = comm.Dup() if busy else None
        before = read_previous(comm)
        executor.start_worker()
        clean_up_at_rest(executor)
        load = partial(_load, executor, prompts, max_tokens, concurrency or len(prompts), max_seconds)
        (tokens_per_s, tokens), small_ms = _exchanging(beside, executor, load) if beside else (load(), [])
        executor.shutdown()
        executor.raise_error()
        counters = status() if policy == PATCHED else {}
        clock = PreviousClock(before, read_previous(comm))
        ranks = comm.gather(_rank(executor, marks, WARMUP_TOKENS * len(prompts), counters, small_ms, clock))
        executor.stage.close()
    return Outcome(tokens_per_s, tokens, ranks, executor.payload_bytes) if executor.dist.is_first_pp_rank else None


def _executor(
    cls: type[HostExecutor], stage: Stage, hold_s: float, arguments: Mapping[str, Any]
) -> tuple[HostExecutor, Marks]:
    """Make the executor; the list gets the moment and the CPU time after each batch that it has relayed."""
    dist = PostingDist() if hold_s else Dist()
    marks: Marks = []

    def after_forward() -> None:
        marks.append((time.monotonic(), time.process_time()))
        if isinstance(dist, PostingDist):
            dist.await_posted(executor.reentry_s)
            hold_gil(hold_s)

    executor = cls(dist, stage, after_forward=after_forward, **arguments)
    return executor, marks


def _exchanging(beside: Any, executor: HostExecutor, load: Callable[[], Generated]) -> tuple[Generated, list[float]]:
    """Put the load on from another thread, while the main thread exchanges small messages over `beside`."""
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        over = loading.done if executor.dist.is_first_pp_rank else executor.shutdown_event.is_set
        small_ms = exchange(beside, over)
        return loading.result(), small_ms


def clean_up_at_rest(executor: HostExecutor) -> None:
    """Let a started executor clean up only once its relay thread is back at its queue.

    The relay of some eras waits for its last send, or tests it, while the executor thread waits for the same request in
    its cleanup. MPI does not allow that, and it can hang: upstream's fault, which is tested elsewhere.
    """
    clean_up, batches = executor._executor_loop_cleanup, executor.executed_batch_queue
    relay = executor.broadcast_sample_state_handler

    def at_rest() -> None:
        while executor.error is None and relay.is_alive():
            if batches.empty() and batches.not_empty._waiters:  # type: ignore[attr-defined]
                break
            time.sleep(0.001)
        clean_up()

    executor._executor_loop_cleanup = at_rest  # type: ignore[method-assign]


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


def _load(
    executor: HostExecutor,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    concurrency: int,
    max_seconds: float | None,
) -> Generated:
    """Have rank 0 generate: a few tokens to warm up, then those that count; the other ranks only follow."""
    if not executor.dist.is_first_pp_rank:
        return 0.0, []

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


def _rank(
    executor: HostExecutor,
    marks: Marks,
    warm: int,
    status: dict[str, Any],
    small_ms: list[float],
    clock: PreviousClock,
) -> Rank:
    polls = getattr(executor, "polls", 0)
    for installed in status.get("installed", []):
        for engine in installed["executors"]:
            polls += sum(table["polls"] for table in engine["tables"].values())
    timed = marks[warm:]
    (t0, cpu0), (t1, cpu1) = timed[0], timed[-1]
    return Rank(
        parked_ms=[round(transfer.parked_s(clock.here) * 1e3, 4) for transfer in executor.transfers[warm:]],
        polls=polls,
        steps=executor.steps,
        cpu_cores=(cpu1 - cpu0) / (t1 - t0),
        reentry_ms=_reentry([t for t, _ in timed], executor.dist.entries) * 1e3,
        wrong=executor.wrong,
        small_ms=[round(trip, 4) for trip in small_ms],
        clock_error_ms=round(clock.error * 1e3, 4),
        clock_drift_ppm=round(clock.drift * 1e6, 2),
    )


def _reentry(steps: list[float], entries: list[float]) -> float:
    """Return the median over steps of the longest time the executor thread stayed outside MPI, in seconds."""
    longest = []
    for start, end in pairwise(steps):
        first, last = bisect.bisect_left(entries, start), bisect.bisect_right(entries, end)
        moments = [start, *entries[first:last], end]
        longest.append(max(b - a for a, b in pairwise(moments)))
    return statistics.median(longest) if longest else 0.0
