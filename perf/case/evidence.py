"""Where a step's time went: what the ranks noted, made into hops, shares and a few steps to look at.

A *hop* is one sample state from one rank to the next. Its transfer lasts from the moment both sides had posted until it
was received. Of that, *wire* is the time in which some thread of the sender was in an MPI call that drives it, *parked*
the rest. Clocks are CLOCK_MONOTONIC of one machine, which its processes share: there is no offset to estimate, and
ranks on several machines are refused (`measure` never sees them: the links are of one machine).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trtllm_pp_progress.tools.bench.rows import quantile

if TYPE_CHECKING:
    from case.measure import Run

__all__ = ["hops", "overlap", "subtract", "summarise", "union"]

Span = tuple[float, float]
SHOWN = 40  # steps kept for the figure and the trace


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the spans merged: sorted, disjoint."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlap(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return what is in both of two merged lists."""
    found: list[Span] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return what is in the first of two merged lists and not in the second."""
    found: list[Span] = []
    for begin, end in one:
        at = max(0, bisect_right(other, (begin, begin)) - 1)
        while at < len(other) and other[at][0] < end:
            if other[at][1] > begin:
                if other[at][0] > begin:
                    found.append((begin, other[at][0]))
                begin = other[at][1]
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def total(spans: Iterable[Span]) -> float:
    """Return the length of merged spans."""
    return sum(end - begin for begin, end in spans)


def senders(pp: int) -> list[int]:
    """Return the ranks that pass a sample state on, in the ring's order."""
    return [pp - 1, *range(pp - 2)]


def hops(run: Run) -> dict[int, list[dict[str, Any]]]:
    """Return the hops of each step of the window, in the ring's order; times in monotonic seconds."""
    pp = len(run.ranks)
    inside = [union(rank.notes.inside) for rank in run.ranks]
    begins = [[begin for begin, _ in spans] for spans in inside]
    return {
        step: [_hop(run, step, sender, inside[sender], begins[sender]) for sender in senders(pp)]
        for step in _steps(run)
    }


def _hop(run: Run, step: int, sender: int, inside: list[Span], begins: list[float]) -> dict[str, Any]:
    """Return one hop of a step; `inside` are the sender's merged spans inside MPI, `begins` where those begin."""
    notes, receiver = run.ranks[sender].notes, run.ranks[(sender + 1) % len(run.ranks)].notes
    posted, receiving, received = notes.posted[step], receiver.receiving[step], receiver.received[step]
    first = max(0, bisect_right(begins, posted) - 1)
    near = inside[first : bisect_right(begins, received)]
    transfer = [(max(posted, receiving), received)]
    wire = overlap(transfer, near)
    return {
        "from": sender,
        "posted": posted,
        "driven": next((max(begin, posted) for begin, end in near if end >= posted), None),
        "receiving": receiving,
        "received": received,
        "wire": wire,
        "parked": subtract(transfer, wire),
    }


def _steps(run: Run) -> list[int]:
    """Return the decode steps of the window that every rank has computed and the ring has carried all the way."""
    pp, (begun, ended) = len(run.ranks), run.window
    last = run.ranks[pp - 2].notes.received
    return [
        step
        for step, (begin, end, decodes) in sorted(run.ranks[0].spans.items())
        if decodes and begin >= begun and end <= ended and last.get(step, ended + 1) <= ended
    ]


def summarise(run: Run) -> dict[str, Any]:
    """Return the figures of one run as JSON has them: ms, rounded; `shown` are steps from its middle."""
    found = hops(run)
    steps = list(found)
    if len(steps) < 3:
        raise ValueError(
            f"only {len(steps)} decode steps were timed: at least 3 are needed, ask for more output tokens"
        )
    if not all(rank.kernels_s for rank in run.ranks):
        raise ValueError("no decode step of some rank could be timed: ask for more output tokens")
    busy, shares = _shares(run, found)
    transfers = {
        f"{sender}->{(sender + 1) % len(run.ranks)}": [
            (total(found[step][i]["parked"]) + total(found[step][i]["wire"])) * 1e3 for step in steps
        ]
        for i, sender in enumerate(senders(len(run.ranks)))
    }
    starts = [run.ranks[0].spans[step][0] for step in steps]
    periods = [(b - a) * 1e3 for a, b in pairwise(starts)]
    return {
        "tokens_per_s": round(run.tokens_per_s, 3),
        "step_ms_p50": round(statistics.median(periods), 4),
        "kernel_ms": [round(statistics.median(rank.kernels_s) * 1e3, 4) for rank in run.ranks],
        "busy": busy,
        "shares": shares,
        "transfer_ms": {
            hop: {"p50": _q(ms, 0.5), "p99": _q(ms, 0.99), "max": _q(ms, 1)} for hop, ms in transfers.items()
        },
        "parked_ms": {q: _q([ms for all_ in transfers.values() for ms in all_], v) for q, v in QUANTILES},
        "reentry_ms": [round(rank.reentry_s * 1e3, 4) for rank in run.ranks],
        "cpu_cores": [round(rank.cpu_cores, 3) for rank in run.ranks],
        "polls_per_step": round(max(rank.polls / max(1, rank.steps) for rank in run.ranks), 1),
        "wrong": sum(rank.wrong for rank in run.ranks),
        "steps": len(steps),
        "shown": _shown(run, found, steps),
    }


def _shares(run: Run, found: dict[int, list[dict[str, Any]]]) -> tuple[list[float], dict[str, float]]:
    """Return the share of time each rank computes, and how the ring's time divides: see docs/measuring.md."""
    spans, steps = [rank.spans for rank in run.ranks], list(found)
    begin, end = spans[0][steps[0]][0], max(hop["received"] for hop in found[steps[-1]])
    computing = [union((a, b) for a, b, _ in of_rank.values() if a >= begin and b <= end) for of_rank in spans]
    compute = union(span for of_rank in computing for span in of_rank)
    parked = union(span for step in steps for hop in found[step] for span in hop["parked"])
    wire = union(span for step in steps for hop in found[step] for span in hop["wire"])
    parts = {
        "compute": total(compute),
        "parked": total(subtract(parked, compute)),
        "wire": total(subtract(subtract(wire, parked), compute)),
    }
    whole = end - begin
    shares = {name: round(seconds / whole, 4) for name, seconds in parts.items()}
    shares["idle"] = round(1 - sum(parts.values()) / whole, 4)
    return [round(total(of_rank) / whole, 4) for of_rank in computing], shares


QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))


def _q(values: Sequence[float], share: float) -> float:
    return round(quantile(values, share), 4)


def _shown(run: Run, found: dict[int, list[dict[str, Any]]], steps: list[int]) -> list[dict[str, Any]]:
    centre = len(steps) // 2
    chosen = steps[max(0, centre - SHOWN // 2) : centre + SHOWN // 2]
    zero = run.ranks[0].spans[chosen[0]][0]

    def ms(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [ms(part) for part in value]
        return round((value - zero) * 1e3, 4) if isinstance(value, float) else value

    return [
        {
            "step": step,
            "forward": [ms(rank.spans[step][:2]) for rank in run.ranks],
            "host": [ms(rank.notes.host[step]) for rank in run.ranks],
            "hops": [
                {name: value if name == "from" else ms(value) for name, value in hop.items()} for hop in found[step]
            ],
        }
        for step in chosen
    ]
