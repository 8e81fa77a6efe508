"""Print rows for people, and write them for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

import trtllm_pp_progress
from trtllm_pp_progress.bench._rows import Floor, Row

__all__ = ["SCHEMA", "console", "environment", "print_table", "write_json"]

SCHEMA = 1
VARIABLES = ("UCX_TLS", "UCX_RNDV_THRESH", "MPIR_CVAR_ASYNC_PROGRESS")  # they change what is measured
REFERENCE = "flush"  # the fastest relay there was, and the one that hangs


def environment(transport: str) -> dict[str, Any]:
    """Describe what was measured on; imports mpi4py."""
    import mpi4py
    from mpi4py import MPI

    return {
        "trtllm_pp_progress": trtllm_pp_progress.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": MPI.Get_library_version().split("\0")[0].split(",")[0].strip(),
        "mpi4py": mpi4py.__version__,
        "thread_level": MPI.Query_thread(),
        "transport": transport,
        **{name: os.environ.get(name, "") for name in VARIABLES},
    }


def console(file: TextIO) -> Console:
    """Return a console for plain text of a fixed width: mpirun's pseudo-terminal has no width or colour to trust."""
    return Console(file=file, width=120, force_terminal=False, highlight=False)


def print_table(rows: Sequence[Row], out: Console, floors: Sequence[Floor] = ()) -> None:
    """Print one table a scenario, the floor below it; the ratio is to the flush relay of the same run."""
    for scenario in dict.fromkeys(row.scenario for row in rows):
        chosen = [row for row in rows if row.scenario == scenario]
        reference = next((row.tokens_per_s for row in chosen if row.policy == REFERENCE), None)
        reentry = "/".join(f"{period:.3g}" for period in chosen[0].reentry_ms)
        table = Table(
            title=f"{scenario}: PP{chosen[0].pp}, {chosen[0].payload_bytes:,} bytes, "
            f"re-entry period by rank ({chosen[0].policy}) {reentry} ms",
            title_justify="left",
        )
        small = any(row.small_ms_p50 is not None for row in chosen)
        for column in (
            "policy",
            "tokens/s",
            f"of {REFERENCE}",
            "parked p50",
            "p99",
            "max ms",
            "polls/step",
            "CPU cores",
            "wrong",
            *(["small ms"] if small else []),
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for row in chosen:
            table.add_row(
                row.policy,
                f"{row.tokens_per_s:.2f}",
                "-" if reference is None else f"{row.tokens_per_s / reference:.3f}",
                f"{row.parked_ms_p50:.2f}",
                f"{row.parked_ms_p99:.2f}",
                f"{row.parked_ms_max:.2f}",
                f"{row.polls_per_step:.1f}",
                f"{row.cpu_cores:.2f}",
                str(row.wrong),
                *(["-" if row.small_ms_p50 is None else f"{row.small_ms_p50:.3f}"] if small else []),
            )
        out.print(table)
        for floor in floors:
            if floor.payload_bytes == chosen[0].payload_bytes:
                out.print(
                    "floor, plain ping-pong of the same bytes, one way, p50 / p99 ms: "
                    f"buffers {floor.buffers_ms_p50:.3f} / {floor.buffers_ms_p99:.3f}, "
                    f"pkl5 {floor.pkl5_ms_p50:.3f} / {floor.pkl5_ms_p99:.3f}"
                )


def write_json(path: Path, rows: Sequence[Row], described: dict[str, Any], floors: Sequence[Floor] = ()) -> None:
    """Write rows with their raw samples; the schema number changes when a key changes its meaning."""
    written = {
        "schema": SCHEMA,
        "environment": described,
        "floor": [asdict(floor) for floor in floors],
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
