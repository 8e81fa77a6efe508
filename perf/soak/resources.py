"""What a process has: threads, descriptors, memory; and whether it stays that way."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["MOST_GROWTH_KIB", "Resources", "grown", "growth", "look"]

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
PARTS = 4  # of a process's lives; in the first one it comes by what it will have
MORE = {"threads": 1, "descriptors": 1, "memory_kib": 16384}  # what a process may have more of at its end, at most
ENOUGH = 150  # lives of a process, for a growth of its memory to be one: for some 80 it comes by what it will have
MOST_GROWTH_KIB = 8.0  # a life, in the median of processes: MPI keeps something of a communicator


class Resources(NamedTuple):
    """A look at a process; memory is what is resident, in KiB."""

    threads: int
    descriptors: int
    memory_kib: int


def look() -> Resources:
    """Look at this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_KIB
    return Resources(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident)


def grown(looks: Sequence[Resources]) -> list[str]:
    """Say what a process has clearly more of at its end; one look after each life."""
    found = []
    for name in Resources._fields if len(looks) >= PARTS else ():
        before, after = _medians(looks, name)
        if after - before > MORE[name]:
            found.append(f"{name} grew from {before:g} to {after:g} in {len(looks)} lives")
    return found


def growth(looks: Sequence[Resources]) -> list[float]:
    """Return by how many KiB a life a process's memory has grown, or nothing where its lives were too few."""
    if len(looks) < ENOUGH:
        return []
    before, after = _medians(looks, "memory_kib")
    return [(after - before) / (len(looks) * (PARTS - 2) / PARTS)]


def _medians(looks: Sequence[Resources], name: str) -> tuple[float, float]:
    """Return the median of what a process had in its second part and in its last."""
    part = len(looks) // PARTS
    values = [getattr(one, name) for one in looks]
    return statistics.median(values[part : 2 * part]), statistics.median(values[-part:])
