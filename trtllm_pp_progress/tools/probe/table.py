"""Print what was probed, for people, and write it for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from trtllm_pp_progress.tools.job.console import console, header
from trtllm_pp_progress.tools.probe.watchdog import verdict

__all__ = ["SCHEMA", "print_run", "write_json"]

SCHEMA = 1
NOT_SOUGHT = -1
BLOCKS_MS = 1.0  # an isend that takes longer is not one


def print_run(run: dict[str, Any], problem: str, file: TextIO) -> None:
    """Print one table a link and what follows from it."""
    out = console(file)
    out.print(header(run["environment"]))
    for link in run["links"]:
        _print_link(run["transport"], link, out)
    if problem:
        out.print(f"CANNOT TELL: {problem}")


def _print_link(transport: str, link: dict[str, Any], out: Any) -> None:
    here, there = link["hosts"]
    edge, timings = link.get("edge_bytes", NOT_SOUGHT), link.get("rows", [])
    largest = max((timing["bytes"] for timing in timings), default=0)
    where = "same host" if here == there else f"{here} to {there}"
    size = f", eager up to {largest:,} bytes" if edge is None else f", rendezvous from {edge:,} bytes on"
    size = "" if edge == NOT_SOUGHT else size
    carried = f", carried by {link['carrier']}" if "carrier" in link else ""
    table = Table(
        title=f"{transport}: rank {link['sender']} to rank {link['receiver']}, {where}{size}{carried}",
        title_justify="left",
    )
    columns = ("bytes", "alone", "waited ms", "isend ms", "wire ms", "driven ms", "polls", "patch buys ms")
    for column in columns:
        table.add_column(column, justify="right")
    for timing in timings:
        table.add_row(
            f"{timing['bytes']:,}",
            "moves" if timing["moves"] else "parks",
            f"{timing['waited_ms']:.2f}",
            f"{timing['isend_ms']:.2f}",
            f"{timing['wire_ms']:.2f}",
            f"{timing['driven_ms']:.2f}",
            f"{timing['polls']:.0f}",
            "-" if timing["moves"] else f"{timing['waited_ms'] - timing['driven_ms']:.0f} of {timing['away_ms']:.0f}",
        )
    out.print(table)
    parked = [timing["bytes"] for timing in timings if not timing["moves"]]
    if parked:
        out.print(
            f"PARKS: sends of {min(parked):,} bytes and more wait until their sender enters MPI again.", width=120
        )
    elif timings:
        out.print("MOVES: every send arrived while its sender was outside MPI; the patch has nothing to do here.")
    blocked = [timing for timing in timings if timing["isend_ms"] > BLOCKS_MS]
    if blocked:
        out.print(
            f"isend itself took {max(timing['isend_ms'] for timing in blocked):.1f} ms: it is not non-blocking here."
        )


def write_json(path: Path, runs: list[dict[str, Any]], code: int, problem: str) -> None:
    """Write the runs; docs/measuring.md lists the keys, and the schema number changes when one changes its meaning."""
    written = {"schema": SCHEMA, "verdict": verdict(code), "exit_code": code, "problem": problem, "runs": runs}
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
