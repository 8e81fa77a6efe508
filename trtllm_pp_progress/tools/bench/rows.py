"""What a run measured, and how runs become a row; needs no MPI."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Floor", "Outcome", "Rank", "Row", "merged", "quantile", "row"]


@dataclass
class Rank:
    """What one rank measured in one run: times in milliseconds."""

    parked_ms: list[float]
    polls: int
    steps: int
    cpu_cores: float
    reentry_ms: float
    wrong: int
    small_ms: list[float] = field(default_factory=list)  # the main thread's exchanges beside the ring, one way
    clock_error_ms: float = 0.0  # of the sender's moments, where its clock is another one; 0 where it is the same
    clock_drift_ppm: float = 0.0


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
    clock_error_ms: float  # of a parked time; 0 where ranks share a clock
    clock_drift_ppm: float
    small_ms_p50: float | None
    reentry_ms: list[float]
    raw: list[dict[str, Any]]


@dataclass
class Floor:
    """One way between two ranks, in milliseconds."""

    payload_bytes: int
    buffers_ms_p50: float
    buffers_ms_p99: float
    pkl5_ms_p50: float
    pkl5_ms_p99: float
    rounds: list[int]  # with buffers, with pkl5
    ranks: list[int] = field(default_factory=lambda: [0, 1])


def row(scenario: str, policy: str, payload_bytes: int, outcomes: Sequence[Outcome]) -> Row:
    """Reduce the runs of one policy in one scenario to a row."""

    def worst(share: float) -> float:
        return statistics.median(max(quantile(rank.parked_ms, share) for rank in o.ranks) for o in outcomes)

    first = outcomes[0]
    small = [max(quantile(rank.small_ms, 0.5) for rank in o.ranks) for o in outcomes]
    return Row(
        scenario=scenario,
        policy=policy,
        pp=len(first.ranks),
        payload_bytes=payload_bytes,
        tokens_per_s=statistics.median(o.tokens_per_s for o in outcomes),
        parked_ms_p50=worst(0.5),
        parked_ms_p99=worst(0.99),
        parked_ms_max=max(quantile(rank.parked_ms, 1.0) for o in outcomes for rank in o.ranks),
        polls_per_step=statistics.median(max(rank.polls / rank.steps for rank in o.ranks) for o in outcomes),
        cpu_cores=statistics.median(statistics.mean(rank.cpu_cores for rank in o.ranks) for o in outcomes),
        wrong=sum(rank.wrong for o in outcomes for rank in o.ranks),
        clock_error_ms=max(rank.clock_error_ms for o in outcomes for rank in o.ranks),
        clock_drift_ppm=max(abs(rank.clock_drift_ppm) for o in outcomes for rank in o.ranks),
        small_ms_p50=statistics.median(small) if any(small) else None,
        reentry_ms=[statistics.median(o.ranks[i].reentry_ms for o in outcomes) for i in range(len(first.ranks))],
        raw=[{"tokens_per_s": o.tokens_per_s, "ranks": [asdict(rank) for rank in o.ranks]} for o in outcomes],
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values stays below; 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def merged(parts: Iterable[Mapping[str, Any]], policy: str, scenario: str) -> Row | None:
    """Make one row of a policy's rows of several files, each as JSON has it; None where there are none."""
    found = [part for part in parts if (part["policy"], part["scenario"]) == (policy, scenario)]
    outcomes = [
        Outcome(raw["tokens_per_s"], [], [Rank(**rank) for rank in raw["ranks"]])
        for part in found
        for raw in part["raw"]
    ]
    return row(scenario, policy, found[0]["payload_bytes"], outcomes) if found else None
