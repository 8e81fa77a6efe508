"""Print what was probed, for people, and write it for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from trtllm_pp_progress.bench._report import console
from trtllm_pp_progress.probe._guard import verdict

__all__ = ["SCHEMA", "print_run", "write_json"]

SCHEMA = 1
BLOCKS_MS = 1.0  # an isend that takes longer is not one


def print_run(run: dict[str, Any], problem: str, file: TextIO) -> None:
    """Print one table a link and what follows from it."""
    out = console(file)
    out.print("# " + ", ".join(f"{key} {value}" for key, value in run["environment"].items()))
    for link in run["links"]:
        _print_link(run["transport"], link, out)
    if problem:
        out.print(f"CANNOT TELL: {problem}")


def _print_link(transport: str, link: dict[str, Any], out: Any) -> None:
    here, there = link["hosts"]
    edge, rows = link.get("edge_bytes"), link.get("rows", [])
    largest = max((row["bytes"] for row in rows), default=0)
    table = Table(
        title=f"{transport}: rank {link['sender']} to rank {link['receiver']}, "
        + ("same host" if here == there else f"{here} to {there}")
        + (f", eager up to {largest:,} bytes" if edge is None else f", rendezvous from {edge:,} bytes on"),
        title_justify="left",
    )
    columns = ("bytes", "alone", "waited ms", "isend ms", "wire ms", "driven ms", "polls", "patch buys ms")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['bytes']:,}",
            "moves" if row["moves"] else "parks",
            f"{row['waited_ms']:.2f}",
            f"{row['isend_ms']:.2f}",
            f"{row['wire_ms']:.2f}",
            f"{row['driven_ms']:.2f}",
            f"{row['polls']:.0f}",
            "-" if row["moves"] else f"{row['waited_ms'] - row['driven_ms']:.0f} of {row['away_ms']:.0f}",
        )
    out.print(table)
    parked = [row["bytes"] for row in rows if not row["moves"]]
    if parked:
        out.print(
            f"PARKS: sends of {min(parked):,} bytes and more wait until their sender enters MPI again.", width=120
        )
    elif rows:
        out.print("MOVES: every send arrived while its sender was outside MPI; the patch has nothing to do here.")
    blocked = [row for row in rows if row["isend_ms"] > BLOCKS_MS]
    if blocked:
        out.print(f"isend itself took {max(row['isend_ms'] for row in blocked):.1f} ms: it is not non-blocking here.")


def write_json(path: Path, runs: list[dict[str, Any]], code: int, problem: str) -> None:
    """Write the runs; perf/README.md lists the keys, and the schema number changes when one changes its meaning."""
    written = {"schema": SCHEMA, "verdict": verdict(code), "exit_code": code, "problem": problem, "runs": runs}
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
