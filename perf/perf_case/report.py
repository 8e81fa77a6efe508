"""Print a result for people: what was run, a table, where a step's time went, one step before and after."""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from rich.table import Table

from perf_case import verdict
from perf_case.figure import middle, text
from trtllm_pp_progress.bench._report import console

__all__ = ["print_result"]


def print_result(written: dict[str, Any]) -> None:
    """Print to stdout."""
    out = console(sys.stdout)
    out.print("# " + ", ".join(f"{key} {value}" for key, value in written["environment"].items()))
    out.print(f"# {written['case']}")
    out.print(f"# scaled: {', '.join(written['scaled'])}" if written["scaled"] else "# as the case has it")
    out.print(
        f"# {written['engine']}, {written['model']}, PP{written['pp']}, link {written['link']}, batches of "
        f"{written['batch']}, {written['payload_bytes']:,} bytes, host work {written['host_work_ms']:g} ms"
        + (" holding the GIL" if written["hold_gil"] else "")
    )
    out.print(_rates(written["rows"]))
    out.print(_shares(written["rows"]))
    shown = {name: middle(written["rows"][name]) for name in ("regressed", "patched") if written["rows"].get(name)}
    if shown:
        out.print(text("one step of the ring", shown))
    for line in written["judged"]:
        if line not in written["failures"]:
            out.print(f"not judged here: {line}")
    for line in written["failures"]:
        out.print(f"FAILED: {line}")
    if not written["failures"]:
        out.print(f"PASSED; {written['compared_tokens']} tokens are those of the unsplit model")


def _rates(rows: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table()
    names = (
        "policy",
        "tokens/s",
        "of flush",
        "ms/step",
        "parked p50",
        "p99",
        "max ms",
        "polls/step",
        "CPU cores",
        "wrong",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    good = median(run["tokens_per_s"] for run in rows["flush"]) if rows.get("flush") else None
    for policy, runs in rows.items():
        rate = median(run["tokens_per_s"] for run in runs)
        parked = [median(run["parked_ms"][q] for run in runs) for q in ("p50", "p99", "max")]
        table.add_row(
            policy,
            f"{rate:.2f}",
            "-" if good is None else f"{rate / good:.3f}",
            f"{median(run['step_ms_p50'] for run in runs):.3f}",
            *(f"{ms:.3f}" for ms in parked),
            f"{median(run['polls_per_step'] for run in runs):.1f}",
            f"{median(sum(run['cpu_cores']) / len(run['cpu_cores']) for run in runs):.2f}",
            str(sum(run["wrong"] for run in runs)),
        )
    return table


def _shares(rows: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table()
    for name in (
        "policy",
        "compute",
        "parked",
        "wire",
        "idle",
        "computing ms/step",
        "busy by rank",
        "executor in MPI every, ms",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, runs in rows.items():
        run = middle(runs)
        table.add_row(
            policy,
            *(f"{run['shares'][part]:.1%}" for part in ("compute", "parked", "wire", "idle")),
            f"{verdict.kernel_ms(run):.3f}",
            "/".join(f"{share:.0%}" for share in run["busy"]),
            "/".join(f"{ms:.2g}" for ms in run["reentry_ms"]),
        )
    return table
