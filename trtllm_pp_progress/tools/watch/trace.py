"""A trace of what the executors of this host do, for Perfetto: counters by rank, read ten times a second."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_pp_progress.tools.watch.readings import Window, compare, read

__all__ = ["events", "record"]

PERIOD_S = 0.1
COUNTERS = {
    "sends/s": "sends_per_s",
    "parked p99 ms": "parked_ms_p99",
    "pending": "pending",
    "native/s": "native_per_s",
}


def record(pids: Sequence[int], seconds: float, file: Path) -> int:
    """Follow every process for so long and write the trace; return the exit code: 1 where there was none."""
    started, written, before = time.monotonic(), list[dict[str, Any]](), read(pids)
    seen = bool(before.said)
    while time.monotonic() - started < seconds:
        time.sleep(PERIOD_S)
        now = read(pids)
        written += events(compare(before, now), now.at - started)
        before, seen = now, seen or bool(now.said)
    file.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": written}) + "\n", encoding="utf-8")
    return int(not seen)


def events(windows: Sequence[Window], at_s: float) -> list[dict[str, Any]]:
    """Return the counters of one window as events of the Trace Event Format, times in microseconds."""
    named = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": one.pid,
            "args": {"name": f"rank {one.rank}, era {one.era}"},
        }
        for one in windows
    ]
    counted = [
        {"ph": "C", "name": title, "pid": one.pid, "ts": at_s * 1e6, "args": {"value": getattr(one, name)}}
        for one in windows
        for title, name in COUNTERS.items()
    ]
    return named + counted
