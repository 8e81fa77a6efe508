"""One step of the ring, before and after, as text and as a picture, made from a result's JSON."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["draw", "example", "middle", "text"]

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
    height = 0.42 * len(next(iter(runs.values()))["kernel_ms"]) + 0.75
    figure, panels = plt.subplots(
        len(runs), 1, sharex=True, figsize=(11, height * len(runs) + 1.1), squeeze=False, layout="constrained"
    )
    for panel, (policy, run) in zip(panels[:, 0], runs.items(), strict=True):
        _draw_step(panel, policy, run, until)
    panels[-1, 0].set_xlabel("ms since rank 0 began the step; dashed: rank 0 begins the next one")
    figure.suptitle(textwrap.fill(title, 130), fontsize=11, x=0.01, ha="left")
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_step(panel: Any, policy: str, run: Mapping[str, Any], until: float) -> None:
    """Draw a run's usual step: a lane a rank, an arrow a hop."""
    ranks = len(run["kernel_ms"])
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
    parts = ", ".join(f"{name} {share:.0%}" for name, share in run["shares"].items())
    heading = f"{policy}:  {run['step_ms_p50']:.2f} ms a step,  {run['tokens_per_s']:.1f} tokens/s   ({parts})"
    panel.set_title(heading, loc="left", fontsize=10)
    panel.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    panel.set_ylim(ranks - 0.4, -0.6)
    panel.set_xlim(min(0.0, *(begin for _, kind, begin, _ in bars if kind == "host")), until)
    panel.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)
