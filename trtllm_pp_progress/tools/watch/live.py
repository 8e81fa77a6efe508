"""`watch`: a table of every patched process, once or until it is interrupted."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from trtllm_pp_progress.tools.watch.readings import Reading, Window, compare, read

__all__ = ["SCHEMA", "render", "watch"]

SCHEMA = 1
NOBODY = "no patched process of this user: is TRTLLM_PP_PROGRESS=1 set where the workers start, and DOOR not 0?"
COLUMNS = {
    "rank": "rank",
    "pid": "pid",
    "era": "era",
    "mode": "mode",
    "sends_per_s": "sends/s",
    "parked_ms_p50": "parked p50",
    "parked_ms_p99": "p99",
    "parked_ms_max": "max ms",
    "pending": "pending",
    "oldest_s": "oldest s",
    "drives_per_s": "drives/s",
    "native_per_s": "native/s",
    "stalls": "stalls",
    "abandoned": "abandoned",
    "driver": "driver",
}


def watch(pids: Sequence[int], period: float, once: bool, form: str, trace: tuple[float, Path] | None) -> int:
    """Show every patched process of this host; return the exit code: 1 where there is none.

    `form` is table, json or csv; `trace` is how many seconds to follow and the file for Perfetto.
    """
    if trace is not None:
        from trtllm_pp_progress.tools.watch.trace import record

        return record(pids, *trace)
    before = read(pids)
    if form == "table" and not once and sys.stdout.isatty():
        return _live(pids, period, before)
    while True:
        time.sleep(period)
        now = read(pids)
        _print(compare(before, now), now, form, sys.stdout, now.at - before.at)
        before = now
        if once:
            return int(not now.said)


def render(windows: Sequence[Window], now: Reading) -> Table:
    """Return the table of one window, with a line for each worker of vLLM."""
    table = Table(title=f"{now.host}: {len(now.said)} patched processes", title_justify="left", box=None)
    for name, title in COLUMNS.items():
        table.add_column(title, justify="left" if name in ("era", "mode", "driver") else "right")
    for executor in windows:
        plain = executor.plain()
        cells = [f"{plain[name]:.2f}" if isinstance(plain[name], float) else str(plain[name]) for name in COLUMNS]
        cells[-1] = "OFF" if executor.off else cells[-1]
        table.add_row(*cells)
    for pid, worker in _workers(now):
        text = f"{worker['role']}, {'at work' if worker['active'] else 'off'}, {worker['steps']} steps"
        table.add_row(str(worker["rank"]), str(pid), "vLLM", "", *[""] * 10, text)
    table.caption = "; ".join(now.problems) or (None if now.said else NOBODY)
    return table


def _workers(now: Reading) -> list[tuple[int, dict[str, Any]]]:
    return [(pid, worker) for pid, said in now.said.items() for worker in said.get("vllm", {}).get("workers", [])]


def _live(pids: Sequence[int], period: float, before: Reading) -> int:
    with Live(render([], before), console=Console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(period)
                now = read(pids)
                live.update(render(compare(before, now), now), refresh=True)
                before = now
        except KeyboardInterrupt:
            return int(not before.said)


def _print(windows: Sequence[Window], now: Reading, form: str, out: TextIO, window_s: float) -> None:
    rows = [executor.plain() for executor in windows]
    if form == "json":
        vllm = [{"pid": pid, **worker} for pid, worker in _workers(now)]
        window = {"host": now.host, "until": time.time() - time.monotonic() + now.at, "window_s": round(window_s, 4)}
        written = {"schema": SCHEMA, **window, "rings": rows, "vllm": vllm, "problems": now.problems}
        print(json.dumps(written), file=out, flush=True)
    elif form == "csv":
        writer = csv.DictWriter(out, list(Window.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(rows)
        out.flush()
    else:
        Console(file=out, width=160, force_terminal=False, highlight=False).print(render(windows, now))
