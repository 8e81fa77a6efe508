"""Print rows for people, and write them for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtllm_pp_progress.tools.bench.rows import Floor, Row

__all__ = ["SCHEMA", "print_table", "write_json"]

SCHEMA = 1
REFERENCE = "flush"  # the fastest relay there was, and the one that hangs


def print_table(rows: Sequence[Row], out: Console, floors: Sequence[Floor] = ()) -> None:
    """Print one table a scenario, the floor below it; the ratio is to the flush relay of the same run."""
    for scenario in dict.fromkeys(row.scenario for row in rows):
        chosen = [row for row in rows if row.scenario == scenario]
        out.print(_table(chosen))
        if any(row.clock_error_ms for row in chosen):
            drift = max(row.clock_drift_ppm for row in chosen)
            out.print(
                "clocks differ: parked times are aligned by round trips before and after a run, ± half the shortest; "
                + (f"drift up to {drift:.1f} ppm" if drift else "no drift seen")
            )
        for floor in floors:
            if floor.payload_bytes == chosen[0].payload_bytes:
                out.print(
                    f"floor, plain ping-pong of the same bytes between ranks {floor.ranks[0]} and {floor.ranks[1]}, "
                    "one way, p50 / p99 ms: "
                    f"buffers {floor.buffers_ms_p50:.3f} / {floor.buffers_ms_p99:.3f}, "
                    f"pkl5 {floor.pkl5_ms_p50:.3f} / {floor.pkl5_ms_p99:.3f}"
                )


def _table(rows: Sequence[Row]) -> Table:
    """Return the table of one scenario; columns that are of use in some runs only are left out in others."""
    reference = next((row.tokens_per_s for row in rows if row.policy == REFERENCE), None)
    reentry = "/".join(f"{period:.3g}" for period in rows[0].reentry_ms)
    columns: dict[str, Callable[[Row], str]] = {
        "policy": lambda row: row.policy,
        "tokens/s": lambda row: f"{row.tokens_per_s:.2f}",
        f"of {REFERENCE}": lambda row: "-" if reference is None else f"{row.tokens_per_s / reference:.3f}",
        "parked p50": lambda row: f"{row.parked_ms_p50:.2f}",
        "p99": lambda row: f"{row.parked_ms_p99:.2f}",
        "max ms": lambda row: f"{row.parked_ms_max:.2f}",
        "± ms": lambda row: f"{row.clock_error_ms:.2f}",
        "polls/step": lambda row: f"{row.polls_per_step:.1f}",
        "CPU cores": lambda row: f"{row.cpu_cores:.2f}",
        "wrong": lambda row: str(row.wrong),
        "small ms": lambda row: "-" if row.small_ms_p50 is None else f"{row.small_ms_p50:.3f}",
    }
    if not any(row.clock_error_ms for row in rows):
        del columns["± ms"]
    if all(row.small_ms_p50 is None for row in rows):
        del columns["small ms"]
    table = Table(
        title=f"{rows[0].scenario}: PP{rows[0].pp}, {rows[0].payload_bytes:,} bytes, "
        f"re-entry period by rank ({rows[0].policy}) {reentry} ms",
        title_justify="left",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def write_json(path: Path, rows: Sequence[Row], described: dict[str, Any], floors: Sequence[Floor] = ()) -> None:
    """Write rows with their raw samples; the schema number changes when a key changes its meaning."""
    written = {
        "schema": SCHEMA,
        "environment": described,
        "floor": [asdict(floor) for floor in floors],
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
