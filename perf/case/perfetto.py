"""The kept steps of a result as trace events (Chrome's JSON), which ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["trace"]

TRACKS = ("executor", "forward", "send", "progress", "receive")
RANKS = 100  # process numbers a policy has to itself
Event = dict[str, Any]


def trace(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the kept steps of every run, a process a policy and rank, times from the earliest on."""
    events: list[Event] = []
    for order, (policy, run) in enumerate(runs.items()):
        ranks = len(run["kernel_ms"])
        for rank in range(ranks):
            events += _names(order * RANKS + rank, f"{policy}, rank {rank}")
        for step in run["shown"]:
            events += _step(order, ranks, step)
    earliest = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - earliest, 3)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(process: int, name: str) -> list[Event]:
    """Return the events that name a process and its tracks."""
    return [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
        *(
            {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for tid, track in enumerate(TRACKS)
        ),
    ]


def _step(order: int, ranks: int, step: Mapping[str, Any]) -> Iterator[Event]:
    number = step["step"]
    for rank, (begin, end) in enumerate(step["forward"]):
        yield _span(order * RANKS + rank, "forward", f"step {number}", begin, end, step=number)
    for rank, (begin, end) in enumerate(step["host"]):
        yield _span(order * RANKS + rank, "executor", f"schedule to launch, step {number}", begin, end, step=number)
    for hop in step["hops"]:
        yield from _hop(order, ranks, number, hop)


def _hop(order: int, ranks: int, number: int, hop: Mapping[str, Any]) -> Iterator[Event]:
    sender, receiver = hop["from"], (hop["from"] + 1) % ranks
    here, there = order * RANKS + sender, order * RANKS + receiver
    driven = "never" if hop["driven"] is None else hop["driven"] - hop["posted"]
    yield _span(here, "send", f"posted, step {number}", hop["posted"], hop["received"], first_drive_ms=driven)
    for kind in ("parked", "wire"):
        for begin, end in hop[kind]:
            yield _span(here, "progress", "moving" if kind == "wire" else kind, begin, end, step=number)
    yield _span(there, "receive", f"receive, step {number}", hop["receiving"], hop["received"], step=number)
    flow = {"cat": "sample state", "name": "sample state", "id": f"{order}.{number}.{sender}"}
    yield {"ph": "s", **flow, "ts": _us(hop["posted"]), "pid": here, "tid": TRACKS.index("send")}
    yield {"ph": "f", "bp": "e", **flow, "ts": _us(hop["received"]), "pid": there, "tid": TRACKS.index("receive")}


def _span(process: int, track: str, name: str, begin: float, end: float, **arguments: Any) -> Event:
    length = _us(max(0.0, end - begin))
    where = {"ph": "X", "pid": process, "tid": TRACKS.index(track), "name": name}
    return {**where, "ts": _us(begin), "dur": length, "args": arguments}


def _us(ms: float) -> float:
    return round(ms * 1e3, 3)
