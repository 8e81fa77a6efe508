"""The points of the sweep: which runs to make, those made, and the CSV that keeps them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click

__all__ = ["PARTS", "PAYLOADS", "Measured", "Point", "append", "points", "read"]

PARTS = ("budget", "interval", "payload")
BUDGETS = (1, 4, 16, 64, 256, 1024, 4096)
INTERVALS_US = (10, 20, 50, 100, 200, 500, 1000, 5000)
KIB = 1024
PAYLOADS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, KIB**2, 8 * KIB**2, 32 * KIB**2)
DEFAULT_BUDGET, DEFAULT_INTERVAL_US, DEFAULT_PAYLOAD = 256, 0, 64 * KIB  # interval 0: the patch's own back-off


@dataclass(frozen=True)
class Point:
    """One run to make."""

    transport: str
    part: str
    relay: str
    budget: int
    interval_us: int
    payload_bytes: int
    late_ms: int
    repetition: int


@dataclass(frozen=True)
class Measured(Point):
    """One run made; the worst rank's times in milliseconds."""

    tokens_per_s: float
    parked_ms_p50: float
    parked_ms_p99: float
    parked_ms_max: float
    polls_per_step: float
    cpu_cores: float
    wrong: int


def points(transport: str, parts: list[str], repeat: int, quick: bool, largest: int) -> Iterator[Point]:
    """Yield all runs over one transport, repetition by repetition, so that all points meet the same machine."""

    def few(values: tuple[int, ...]) -> tuple[int, ...]:
        return (values[0], values[len(values) // 2], values[-1]) if quick else values

    for repetition in range(repeat):
        if "budget" in parts:
            for late_ms in (0, 20):
                for budget in few(BUDGETS):
                    for relay in ("oneshot", "patched"):
                        yield Point(transport, "budget", relay, budget, 0, DEFAULT_PAYLOAD, late_ms, repetition)
        if "interval" in parts:
            for interval_us in few(INTERVALS_US):
                yield Point(
                    transport, "interval", "patched", DEFAULT_BUDGET, interval_us, DEFAULT_PAYLOAD, 0, repetition
                )
        if "payload" in parts:
            for size in few(tuple(size for size in PAYLOADS if size <= largest)):
                for relay in ("flush", "oneshot", "patched"):
                    budget = 64 if relay == "oneshot" else DEFAULT_BUDGET
                    yield Point(transport, "payload", relay, budget, 0, size, 0, repetition)


def read(csv_file: Path) -> list[Measured]:
    """Return what has been measured; ClickException where the file is of another sweep."""
    if not csv_file.exists():
        return []
    with csv_file.open(newline="", encoding="utf-8") as file:
        table = csv.reader(file)
        names = [field.name for field in fields(Measured)]
        if next(table, None) != names:
            raise click.ClickException(f"{csv_file} has not the columns {', '.join(names)}")
        kinds = [{"str": str, "int": int, "float": float}[str(field.type)] for field in fields(Measured)]
        return [Measured(*(kind(value) for kind, value in zip(kinds, row, strict=True))) for row in table]


def append(csv_file: Path, measured: Measured) -> None:
    """Add one run to the file, which is made where there is none."""
    new = not csv_file.exists()
    with csv_file.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(field.name for field in fields(Measured))
        table.writerow(f"{value:.4f}" if isinstance(value, float) else value for value in asdict(measured).values())
