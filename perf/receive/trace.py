"""Read out of traces what happened around sampled-result receives: Nsight Systems (SQLite) or torch profiler (JSON).

    nsys export --type sqlite report.nsys-rep && python perf receive-trace report.sqlite --pp 4
    python perf receive-trace rank0.pt.trace.json.gz rank3.pt.trace.json.gz --pp 4 --age 3

One file per rank, or one nsys export with a rank per device. Every engine step has to be marked by a range on the host
whose name matches --step (vLLM's profiler writes "execute_..." when it is on). Broadcast kernels are taken in order,
--per-step of them for each step that has any; `--age` says how many steps after T this run posted them (0: vLLM as it
is).
"""

from __future__ import annotations

import argparse
import re
import sqlite3
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import output
from receive.trace_files import STEP, Kernel, Rank, TraceError, read

BROADCAST = r"(?i)broadcast|emulated_receive"


@dataclass
class Report:
    """What a trace says about one rank; times in microseconds, means over units."""

    rank: str
    units: int  # steps that broadcast something
    post: float  # from the start of T to the host's launch
    lifetime: float  # of a unit's kernels, summed
    ready_next: float  # share of units that had ended at the start of the step after T
    ready_consume: float  # share of units that had ended at the start of T + pp
    blocked: float  # of the main stream before T + pp's first kernel, for the unit alone
    model_alone: float  # mean main-stream kernel time with no broadcast resident
    model_beside: float  # the same with one resident
    slowdown: float  # of the kernels that ran both ways, weighted by how often they ran beside one

    def cells(self) -> tuple[str, ...]:
        """Return the report as one line of the table."""
        return (
            self.rank, str(self.units), f"{self.post:.1f}", f"{self.lifetime:.1f}", f"{self.ready_next:.0%}",
            f"{self.ready_consume:.0%}", f"{self.blocked:.1f}", f"{self.model_alone:.2f}", f"{self.model_beside:.2f}",
            f"{self.slowdown:.3f}",
        )  # fmt: skip


COLUMNS = (
    "rank", "units", "post", "lifetime", "ready T+1", "ready T+pp", "blocked", "alone", "beside", "slowdown",
)  # fmt: skip
UNITS = ("", "", "us", "us", "", "", "us", "us", "us", "")


def report(rank: Rank, pp: int, age: int = 0, per_step: int = 2, broadcast: str = BROADCAST) -> Report:
    """Work out one rank's report; on the last rank `post` and `lifetime` are the source's."""
    casts = [kernel for kernel in rank.kernels if re.search(broadcast, kernel.name)]
    streams = {kernel.stream for kernel in casts}
    others = Counter(kernel.stream for kernel in rank.kernels if kernel.stream not in streams)
    if not casts or not others:
        what = f"kernel matches {broadcast}" if not casts else "model runs beside the broadcasts"
        raise TraceError(f"{rank.name}: no {what}")
    main = [kernel for kernel in rank.kernels if kernel.stream == others.most_common(1)[0][0]]
    units = [casts[i : i + per_step] for i in range(0, len(casts) - per_step + 1, per_step)]
    posts, next_ready, consume_ready, blocked = [], [], [], []
    for unit in units:
        posted = unit[0].posted if unit[0].posted is not None else unit[0].start
        step = bisect_right(rank.steps, posted) - 1 - age
        if step < 0:
            continue  # T lies before the trace
        posts.append(posted - rank.steps[step])
        if step + 1 < len(rank.steps):
            next_ready.append(unit[-1].end <= rank.steps[step + 1])
        if step + pp < len(rank.steps):
            consume_ready.append(unit[-1].end <= rank.steps[step + pp])
            blocked.append(_blocked(unit[-1].end, rank.steps[step + pp], main))
    alone, beside = _split(main, casts)
    return Report(
        rank.name, len(units), _mean(posts), _mean(sum(k.end - k.start for k in unit) for unit in units),
        _mean(next_ready), _mean(consume_ready), _mean(blocked), _mean(_spans(alone)), _mean(_spans(beside)),
        _slowdown(alone, beside),
    )  # fmt: skip


def _blocked(ended: float, step: float, main: list[Kernel]) -> float:
    """Return how long the main stream could have gone on with a step but for a broadcast that had not ended."""
    index = bisect_right([kernel.start for kernel in main], ended)
    if index == len(main):
        return 0.0
    before = main[index - 1].end if index else step
    return max(0.0, ended - max(step, before))


def _split(main: list[Kernel], casts: list[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Divide the model's kernels into those with no broadcast resident and those wholly beside one."""
    starts = [cast.start for cast in casts]
    latest: list[float] = []  # the latest end up to each broadcast
    for cast in casts:
        latest.append(max(cast.end, latest[-1] if latest else cast.end))
    alone, beside = [], []
    for kernel in main:
        index = bisect_right(starts, kernel.start) - 1
        if index >= 0 and latest[index] >= kernel.end:
            beside.append(kernel)
        elif (index < 0 or latest[index] <= kernel.start) and bisect_right(starts, kernel.end) - 1 == index:
            alone.append(kernel)
    return alone, beside


def _slowdown(alone: list[Kernel], beside: list[Kernel]) -> float:
    """Compare kernels of one name, weighted by their runs beside a broadcast; 1 if none ran both ways."""
    times: tuple[defaultdict[str, list[float]], defaultdict[str, list[float]]] = defaultdict(list), defaultdict(list)
    for side, kernels in zip(times, (alone, beside), strict=True):
        for kernel in kernels:
            side[kernel.name].append(kernel.end - kernel.start)
    both = times[0].keys() & times[1].keys()
    expected = sum(_mean(times[0][name]) * len(times[1][name]) for name in both)
    return sum(sum(times[1][name]) for name in both) / expected if expected else 1.0


def _spans(kernels: list[Kernel]) -> list[float]:
    return [kernel.end - kernel.start for kernel in kernels]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def main(argv: list[str] | None = None) -> int:
    """Print one line per rank; return 0, or 2 where a trace cannot be read."""
    parser = argparse.ArgumentParser(description="Report sampled-result receives from traces, per rank.")
    parser.add_argument("traces", nargs="+", type=Path, help="nsys SQLite exports or torch profiler traces")
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages")
    parser.add_argument("--age", type=int, default=0, help="steps between T and posting in this run (0: vLLM as it is)")
    parser.add_argument("--per-step", type=int, default=2, help="broadcasts of one step: 2, or 3 with drafts")
    parser.add_argument("--step", default=STEP, help="pattern of the host ranges that mark an engine step")
    parser.add_argument("--broadcast", default=BROADCAST, help="pattern of the broadcast kernels' names")
    options = parser.parse_args(argv)
    try:
        rows = [
            report(rank, options.pp, options.age, options.per_step, options.broadcast).cells()
            for path in options.traces
            for rank in read(path, options.step)
        ]
    except (TraceError, OSError, sqlite3.DatabaseError) as error:
        print(f"receive-trace: {error}")
        return 2
    print(output.table(COLUMNS, rows, UNITS))
    return 0
