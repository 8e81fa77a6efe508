"""Rows of the one-GPU measurement: medians, the table, and the thresholds they are held against."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

import output

__all__ = ["ARMS", "Row", "median", "proves_nothing", "table", "verdicts"]

ARMS = ("none", "immediate", "pre-model", "post-model")


@dataclass
class Row:
    """One arm's measurement: medians over rounds, times in milliseconds per step."""

    load: str
    arm: str
    ctas: int
    connections: str
    pp: int
    step_ms: float
    model_ms: float
    resident_ms: float
    share: float
    wait_ms: float
    wrong: int
    age: float  # mean steps between saving and posting


def median(rows: list[Row]) -> Row:
    """Return the median of several runs of one arm, field by field; wrong values add up."""
    middle = asdict(rows[0])
    for name in ("step_ms", "model_ms", "resident_ms", "share", "wait_ms"):
        middle[name] = statistics.median(getattr(row, name) for row in rows)
    return Row(**{**middle, "wrong": sum(row.wrong for row in rows)})


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    columns = ("load", "arm", "connections", "ctas", "step", "model", "resident", "share", "wait", "age", "#wrong")
    units = ("", "", "", "", "ms", "ms", "ms", "", "ms", "steps", "")
    cells = [
        (row.load, row.arm, row.connections, str(row.ctas), f"{row.step_ms:.3f}", f"{row.model_ms:.3f}",
         f"{row.resident_ms:.3f}", f"{row.share:.0%}", f"{row.wait_ms:.3f}", f"{row.age:.2f}", str(row.wrong))
        for row in rows
    ]  # fmt: skip
    return output.table(columns, cells, units, left=3)


def verdicts(rows: list[Row]) -> list[str]:
    """Return what misses the thresholds: post-model against immediate and against no receiver at all."""
    found = {(row.load, row.connections, row.ctas, row.arm): row for row in rows}
    misses = [f"{row.load} {row.arm} {row.ctas} CTAs: {row.wrong} wrong values" for row in rows if row.wrong]
    for (load, connections, ctas, arm), row in found.items():
        if arm != "post-model":
            continue
        where = f"{load}, {ctas} CTAs, connections {connections}"
        immediate, none = found[load, connections, ctas, "immediate"], found[load, connections, 1, "none"]
        if row.resident_ms > 0.25 * immediate.resident_ms:
            misses.append(f"{where}: resident {row.resident_ms:.3f} ms, immediate {immediate.resident_ms:.3f} ms")
        if row.wait_ms > immediate.wait_ms + 0.02 * none.step_ms:  # a fiftieth of a step is the events' own noise
            misses.append(f"{where}: waited {row.wait_ms:.3f} ms, immediate {immediate.wait_ms:.3f} ms")
        if row.model_ms > 1.02 * none.model_ms:
            misses.append(f"{where}: model {row.model_ms:.3f} ms, {none.model_ms:.3f} ms with no receiver")
    return misses


def proves_nothing(rows: list[Row]) -> list[str]:
    """Return where even the immediate receive is resident for less than a quarter of a step: nothing to be saved."""
    return [
        f"{row.load}, {row.ctas} CTAs: immediate is resident for {row.resident_ms:.3f} of {row.step_ms:.3f} ms"
        for row in rows
        if row.arm == "immediate" and row.share < 0.25
    ]
