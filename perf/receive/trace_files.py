"""Read a rank's steps and kernels out of an Nsight Systems export (SQLite) or a torch profiler trace (JSON)."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["STEP", "Kernel", "Rank", "TraceError", "read"]

STEP = r"^execute_"


class TraceError(ValueError):
    """A trace cannot be read; the message says what is missing."""


@dataclass
class Kernel:
    """One kernel; times in microseconds."""

    name: str
    start: float
    end: float
    stream: int
    posted: float | None = None  # when the host launched it


@dataclass
class Rank:
    """What a trace says about one rank."""

    name: str
    steps: list[float]  # when the host began each
    kernels: list[Kernel] = field(default_factory=list)


def read(path: Path, step: str = STEP) -> list[Rank]:
    """Read a trace of either kind, told apart by its first bytes; raises TraceError."""
    with path.open("rb") as file:
        head = file.read(16)
    ranks = _read_nsys(path, step) if head.startswith(b"SQLite format 3") else [_read_torch(path, step)]
    for rank in ranks:
        if not rank.kernels:
            raise TraceError(f"{path.name}: {rank.name} has no kernels")
        if not rank.steps:
            raise TraceError(f"{path.name}: {rank.name} has no ranges that match {step!r}; see --step")
        rank.kernels.sort(key=lambda kernel: kernel.start)
        rank.steps.sort()
    return ranks


def _read_torch(path: Path, step: str) -> Rank:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        events = trace["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path.name}: no torch profiler trace ({error})") from None
    number = (trace.get("distributedInfo") or {}).get("rank")
    rank = Rank(f"rank {number}" if number is not None else path.name.split(".")[0], [])
    launched: dict[Any, float] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, arguments, start = event.get("cat"), event.get("args", {}), float(event["ts"])
        if kind in ("cuda_runtime", "cuda_driver", "hip_runtime"):
            launched[arguments.get("correlation")] = start
        elif kind == "kernel":
            kernel = Kernel(event["name"], start, start + float(event["dur"]), int(arguments["stream"]))
            kernel.posted = arguments.get("correlation")  # resolved below: the launch may stand later in the file
            rank.kernels.append(kernel)
        elif kind == "user_annotation" and re.search(step, event["name"]):
            rank.steps.append(start)
    for kernel in rank.kernels:
        kernel.posted = launched.get(kernel.posted)
    return rank


def _read_nsys(path: Path, step: str) -> list[Rank]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as base:
        tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        needed = {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "StringIds", "NVTX_EVENTS"}
        if missing := sorted(needed - tables):
            raise TraceError(f"{path.name}: no table {missing[0]}; record with --trace=cuda,nvtx")
        kernels = base.execute(
            "SELECT k.deviceId, k.globalPid / 0x1000000, s.value, k.start, k.end, k.streamId, r.start"
            " FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"
            " LEFT JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId"
            " AND r.globalTid / 0x1000000 = k.globalPid / 0x1000000"
        ).fetchall()
        ranges = base.execute(
            "SELECT n.globalTid / 0x1000000, n.start, COALESCE(n.text, s.value)"
            " FROM NVTX_EVENTS n LEFT JOIN StringIds s ON s.id = n.textId WHERE n.end IS NOT NULL"
        ).fetchall()
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for process, start, text in ranges:
        if text and re.search(step, text):
            steps[process].append(start / 1e3)
    ranks: dict[tuple[int, int], Rank] = {}
    for device, process, name, start, end, stream, posted in kernels:
        rank = ranks.setdefault((device, process), Rank(f"device {device}", list(steps[process])))
        rank.kernels.append(Kernel(name, start / 1e3, end / 1e3, stream, posted / 1e3 if posted is not None else None))
    return [ranks[key] for key in sorted(ranks)]
