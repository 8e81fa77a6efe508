"""The sweep as a plot: medians over repetitions, a row of panels a transport, a panel a part."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from relay.points import Measured

__all__ = ["draw"]

PANELS = {  # what is on each axis
    "budget": ("budget", "tokens_per_s"),
    "interval": ("interval_us", "tokens_per_s"),
    "payload": ("payload_bytes", "parked_ms_p99"),
}


def draw(measured: Sequence[Measured], plot: Path) -> None:
    """Write the plot; ClickException where nothing has been measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    transports = list(dict.fromkeys(one.transport for one in measured))
    if not transports:
        raise click.ClickException("nothing has been measured: run without --plot-only first")
    figure, axes = plt.subplots(len(transports), len(PANELS), figsize=(15, 4 * len(transports)), squeeze=False)
    for transport, row in zip(transports, axes, strict=True):
        for part, panel in zip(PANELS, row, strict=True):
            _draw_panel(panel, part, [one for one in measured if (one.transport, one.part) == (transport, part)])
            panel.set_title(f"{transport}: {part}")
    figure.tight_layout()
    figure.savefig(plot, dpi=110, metadata={"Software": None})


def _draw_panel(panel: Any, part: str, measured: Sequence[Measured]) -> None:
    x, y = PANELS[part]
    lines: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        lines[one.relay, one.late_ms][getattr(one, x)].append(getattr(one, y))
    for (relay, late_ms), values in lines.items():
        xs = sorted(values)
        label = relay + (f", receiver {late_ms} ms late" if late_ms else "")
        panel.plot(xs, [statistics.median(values[at]) for at in xs], marker="o", label=label)
    panel.set(xscale="log", xlabel=x, ylabel=y)
    if part == "payload":
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)  # a few per cent are what one run scatters by
    if lines:
        panel.legend()
