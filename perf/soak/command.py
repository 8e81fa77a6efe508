"""Lives of executors of random eras, payloads, latenesses and ends, over a real MPI, in one process after the other.

    python perf soak [--seconds 60] [--ranks 2] [--seed 1]      # starts mpirun itself
    python perf soak --seed 17 --lives 230                      # the one process of lives that failed, again

Prints a line a minute and a verdict: hangs, wrong lives, and whether threads, descriptors and memory stay as they are.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from soak.resources import MOST_GROWTH_KIB, Resources, grown, growth
from trtllm_pp_progress.tools.job.launch import TRANSPORTS, LaunchError, launch
from trtllm_pp_progress.tools.job.options import Names, run_command

__all__ = ["main"]

HERE = Path(__file__).parents[1]
DOUBLES = HERE.parent / "tests" / "support"
ENOUGH_OF_THEM = 5  # processes, for their median to be one
PROCESS_LIVES = 400  # MPI has some 2,000 communicators, and a process has to end as well
LATE_S = 200.0  # a life's limit, and the end of a process
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # Open MPI spins with all its might where cores are short, too
TOLD = 60  # lines of a rank that did not end


class Soak:
    """What has been lived so far."""

    def __init__(self, ranks: int, transport: str) -> None:
        self._ranks, self._transport = ranks, transport
        self.lives = self.processes = 0
        self.faults: list[str] = []
        self.has: Resources | None = None
        self._growth: list[float] = []

    @property
    def growth(self) -> float:
        """By how many KiB a life memory grows, in the median of ranks and processes; 0 of too few."""
        return statistics.median(self._growth) if len(self._growth) >= ENOUGH_OF_THEM * self._ranks else 0.0

    def process(self, seed: int, seconds: float, lives: int) -> None:
        """Run a process of lives on each rank, and note what came of it."""
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            path = os.pathsep.join(map(str, (HERE, DOUBLES, HERE.parent)))
            arguments = [str(HERE / "soak" / "rank.py"), folder, str(seed), f"{seconds:g}", str(lives)]
            try:
                environ = {**os.environ, "PYTHONPATH": path}
                code: object = launch(
                    self._ranks, self._transport, arguments, seconds + LATE_S, YIELDING, silent=True, environ=environ
                )
            except LaunchError as error:  # its time is over
                code = error
            records = [_read(Path(folder, f"rank-{rank}.jsonl")) for rank in range(self._ranks)]
            said = [_tail(Path(folder, f"rank-{rank}.txt")) for rank in range(self._ranks)]
        self.processes += 1
        self.lives += min(len(record) for record in records)
        again = f"python perf soak --ranks {self._ranks} --seed {seed} --lives"
        for rank, record in enumerate(records):
            found = [f"{entry['wrong']} in life {number}" for number, entry in enumerate(record) if entry["wrong"]]
            looks = [Resources(*entry["has"]) for entry in record if "has" in entry]
            found += grown(looks)
            self._growth += growth(looks)
            if len(looks) < len(record):
                found.append(f"life {len(record) - 1} did not end: {record[-1]['situation']}\n{said[rank]}")
            self.faults += [f"rank {rank}: {what}; again: {again} {len(record)}" for what in found]
            self.has = looks[-1] if looks else self.has
        if code and not any(again in fault for fault in self.faults):
            text = "\n".join(said)
            self.faults.append(f"the process ended with {code}; again: {again} {max(map(len, records))}\n{text}")

    def figure(self, seconds: float) -> str:
        """Return the line of a minute."""
        has = self.has or Resources(0, 0, 0)
        rate = self.lives / seconds if seconds else 0.0
        return (
            f"{seconds / 60:6.1f} min: {self.lives} lives in {self.processes} processes ({rate:.1f} a second), "
            f"{len(self.faults)} faults; the last one had {has.threads} threads, {has.descriptors} descriptors, "
            f"{has.memory_kib / 1024:.0f} MiB; memory grows by {self.growth:.1f} KiB a life"
        )


def _read(path: Path) -> list[dict[str, Any]]:
    """Return an entry for each life that was begun."""
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if "life" in entry:
            found.append({"wrong": [], **entry})
        else:
            found[-1].update(entry)
    return found


def _tail(path: Path) -> str:
    """Return the end of what a rank wrote."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-TOLD:]) if path.exists() else ""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seconds", default=60.0, show_default=True, type=click.FloatRange(1), help="How long to go on.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 64))
@click.option("--transport", default="tcp", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the first process of lives.")
@click.option("--lives", type=click.IntRange(1), help="One process of so many lives, as a fault names it.")
def command(seconds: float, ranks: int, transport: list[str], seed: int, lives: int | None) -> None:
    """Live, and say what was found."""
    soak, began = Soak(ranks, transport[0]), time.monotonic()
    minute, shown = 0.0, 0
    while (left := seconds - (time.monotonic() - began)) > 0:
        soak.process(seed, 3600.0 if lives else min(left, 60.0), lives or PROCESS_LIVES)
        if (passed := time.monotonic() - began) >= minute + 60 or len(soak.faults) > shown:
            minute = passed
            print(soak.figure(passed), *soak.faults[shown:], sep="\n", flush=True)
            shown = len(soak.faults)
        seed += 1
        if lives:
            break
    print(soak.figure(time.monotonic() - began))
    if soak.growth > MOST_GROWTH_KIB:
        soak.faults.append("memory grows")
    verdict = f"{len(soak.faults)} faults" if soak.faults else "nothing hung, was wrong, or was left behind"
    print(f"verdict: {soak.lives} lives: {verdict}")
    if soak.faults or not soak.lives:
        raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2, a fault exit code 1."""
    run_command(command, arguments)
