"""One step of the ring, before and after, as text and as a picture; and the kept steps as a trace for Perfetto.

All three are made from a result's JSON, on any machine; only the picture needs matplotlib.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["draw", "example", "middle", "text", "trace"]

WIDTH = 100  # characters of a text timeline
COLOURS = {"host": "#9a9a9a", "compute": "#4269d0", "next": "#b9c8ee", "parked": "#d9483b", "wire": "#3ca951"}
WORDS = {
    "host": "host: schedule to launch",
    "compute": "forward",
    "next": "forward of the next step",
    "parked": "sample state parked",
    "wire": "sample state moving",
}


LANES = {
    "host": (-0.36, 0.1),
    "compute": (-0.1, 0.36),
    "next": (-0.1, 0.36),
    "parked": (0.27, 0.22),
    "wire": (0.27, 0.22),
}


def middle(runs: Sequence[Mapping[str, Any]]) -> Any:
    """Return the run of middle speed: the one that stands for its policy in tables and pictures."""
    return sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2]


def example(run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the step of usual length among those kept, and the one after it if it was kept."""
    shown = run["shown"]
    if len(shown) < 2:
        return shown[0], None
    lengths = [_start(after) - _start(step) for step, after in pairwise(shown)]
    usual = statistics.median_low(lengths)
    at = lengths.index(usual)
    return shown[at], shown[at + 1]


def _start(step: Mapping[str, Any]) -> float:
    return float(step["forward"][0][0])


def _bars(run: Mapping[str, Any]) -> tuple[list[tuple[int, str, float, float]], float]:
    """Return (rank, kind, begin, end), ms from the step's start, hops in their sender's lane, and the ring's end."""
    step, after = example(run)
    zero = _start(step)
    bars = [(rank, "compute", a - zero, b - zero) for rank, (a, b) in enumerate(step["forward"])]
    for hop in step["hops"]:
        bars += [(hop["from"], kind, a - zero, b - zero) for kind in ("parked", "wire") for a, b in hop[kind]]
    bars += [(rank, "host", a - zero, b - zero) for rank, (a, b) in enumerate(step["host"])]
    if after is not None:
        bars += [(rank, "next", a - zero, b - zero) for rank, (a, b) in enumerate(after["forward"])]
        bars += [(rank, "host", a - zero, b - zero) for rank, (a, b) in enumerate(after["host"])]
    return bars, max(max(hop["received"] for hop in step["hops"]) - zero, step["forward"][-1][1] - zero)


def _until(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the end of the common time axis: every run's ring is done and its next step has left rank 0."""
    ends = []
    for run in runs:
        bars, done = _bars(run)
        ends.append(max([done, *(end for rank, kind, _, end in bars if kind == "next" and rank == 0)]))
    return max(ends) * 1.02


def text(title: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the timelines of one step, a line a rank, all to one scale."""
    until = _until(list(runs.values()))
    marks = {"next": "-", "compute": "#", "wire": "=", "parked": "!"}
    lines = [title, f"# forward   ! parked   = moving   - forward of the next step   ({until:.2f} ms wide)"]
    for policy, run in runs.items():
        bars, _ = _bars(run)
        ranks = len(run["kernel_ms"])
        lines.append(f"{policy}: {run['step_ms_p50']:.2f} ms a step, {run['tokens_per_s']:.1f} tokens/s")
        for rank in range(ranks):
            lane = [" "] * WIDTH
            for kind, mark in marks.items():
                for _, _, begin, end in (bar for bar in bars if bar[:2] == (rank, kind)):
                    low = min(WIDTH - 1, int(begin / until * WIDTH))
                    high = min(WIDTH, max(low + 1, round(end / until * WIDTH)))
                    lane[low:high] = mark * (high - low)
            lines.append(f"  rank {rank} |{''.join(lane)}|")
    return "\n".join(lines)


def draw(title: str, runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write the timelines of one step as a PNG, one panel a policy, all to one scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    until = _until(list(runs.values()))
    ranks = len(next(iter(runs.values()))["kernel_ms"])
    height = 0.42 * ranks + 0.75
    figure, panels = plt.subplots(
        len(runs), 1, sharex=True, figsize=(11, height * len(runs) + 1.1), squeeze=False, layout="constrained"
    )
    for panel, (policy, run) in zip(panels[:, 0], runs.items(), strict=True):
        bars, _ = _bars(run)
        step, after = example(run)
        zero = _start(step)
        for rank, kind, begin, end in bars:
            centre, thick = LANES[kind]
            panel.barh(rank + centre, end - begin, left=begin, height=thick, color=COLOURS[kind], linewidth=0)
        for hop in step["hops"]:
            receiver, at = (hop["from"] + 1) % ranks, hop["received"] - zero
            panel.annotate(
                "",
                (at, receiver + (-0.4 if receiver > hop["from"] else 0.4)),
                (at, hop["from"] + 0.27),
                arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0},
            )
        if after is not None:
            panel.axvline(_start(after) - zero, color="#222222", linewidth=0.9, linestyle=(0, (4, 3)))
        shares = run["shares"]
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        panel.set_title(
            f"{policy}:  {run['step_ms_p50']:.2f} ms a step,  {run['tokens_per_s']:.1f} tokens/s   ({parts})",
            loc="left",
            fontsize=10,
        )
        panel.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        panel.set_ylim(ranks - 0.4, -0.6)
        panel.set_xlim(min(0.0, *(begin for _, kind, begin, _ in bars if kind == "host")), until)
        panel.grid(axis="x", color="#e4e4e4", linewidth=0.6)
        panel.set_axisbelow(True)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[-1, 0].set_xlabel("ms since rank 0 began the step; dashed: rank 0 begins the next one")
    figure.suptitle(textwrap.fill(title, 130), fontsize=11, x=0.01, ha="left")
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def trace(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the kept steps as trace events (Chrome's JSON; ui.perfetto.dev opens it), a process a policy and rank."""
    events: list[dict[str, Any]] = []

    def span(process: int, thread: str, name: str, begin: float, end: float, **arguments: Any) -> None:
        events.append(
            {"ph": "X", "pid": process, "tid": TRACKS.index(thread), "name": name, "ts": round(begin * 1e3, 3),
             "dur": round(max(0.0, end - begin) * 1e3, 3), "args": arguments}
        )  # fmt: skip

    for order, (policy, run) in enumerate(runs.items()):
        ranks = len(run["kernel_ms"])
        for rank in range(ranks):
            process = order * 100 + rank
            events.append(
                {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{policy}, rank {rank}"}}
            )
            events.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
            events += [
                {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}}
                for tid, name in enumerate(TRACKS)
            ]
        for step in run["shown"]:
            number = step["step"]
            for rank, (begin, end) in enumerate(step["forward"]):
                span(order * 100 + rank, "forward", f"step {number}", begin, end, step=number)
            for rank, (begin, end) in enumerate(step["host"]):
                span(order * 100 + rank, "executor", f"schedule to launch, step {number}", begin, end, step=number)
            for hop in step["hops"]:
                sender, receiver = hop["from"], (hop["from"] + 1) % ranks
                here, there = order * 100 + sender, order * 100 + receiver
                driven = "never" if hop["driven"] is None else hop["driven"] - hop["posted"]
                span(here, "send", f"posted, step {number}", hop["posted"], hop["received"], first_drive_ms=driven)
                for kind in ("parked", "wire"):
                    for begin, end in hop[kind]:
                        span(here, "progress", "moving" if kind == "wire" else kind, begin, end, step=number)
                span(there, "receive", f"receive, step {number}", hop["receiving"], hop["received"], step=number)
                flow = {"cat": "sample state", "name": "sample state", "id": f"{order}.{number}.{sender}"}
                at = {"ts": round(hop["posted"] * 1e3, 3), "pid": here, "tid": TRACKS.index("send")}
                events.append({"ph": "s", **flow, **at})
                at = {"ts": round(hop["received"] * 1e3, 3), "pid": there, "tid": TRACKS.index("receive")}
                events.append({"ph": "f", "bp": "e", **flow, **at})
    earliest = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - earliest, 3)
    return {"displayTimeUnit": "ms", "traceEvents": events}


TRACKS = ("executor", "forward", "send", "progress", "receive")
