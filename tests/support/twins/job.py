"""Run one situation as one of the twins, on ranks of a real MPI, and gather what its ranks have noted."""

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jobs import ROOT, on_ranks

from twins.record import read

HERE = Path(__file__).parent
STARTED_S = 60.0  # beyond the limit of an end
ABORTS = ("after MPI_FINALIZE", "MPI_ABORT", "An error occurred in MPI")  # MPI ends the job
CRASHES = ("Fatal Python error", "Segmentation fault", "Assertion")


@dataclass
class Rank:
    """What one rank noted: by event its facts, and all that it wrote."""

    role: str
    events: dict
    output: str

    def at(self, event):
        """Return when something happened (seconds of the machine's clock), or None."""
        return self.events[event]["at"] if event in self.events else None

    def took(self, first, last):
        """Return the seconds between two events, or None where one of them is missing."""
        begin, end = self.at(first), self.at(last)
        return None if begin is None or end is None else end - begin

    @property
    def hung(self):
        """Whether its warden had to cut it."""
        return "cut" in self.events

    @property
    def code(self):
        """Its exit code, below zero for a signal; None where the launcher ended it or it was cut."""
        ended = self.events.get("ended")
        return None if ended is None or "ended by the launcher" in self.events else ended["code"]

    @property
    def tokens(self):
        """The tokens that were generated, known to rank 0."""
        return self.events.get("tokens", {}).get("tokens")

    @property
    def end_s(self):
        """How long its end took, or None."""
        return self.took("ends", "ended")

    @property
    def closed_s(self):
        """How long its executor's shutdown took, from when its end began, or None."""
        return self.took("ends", "closed")

    @property
    def latency_s(self):
        """How long the withheld sample state took from the receive being posted, or None."""
        return self.took("receives", "received")

    def complains_of(self, texts):
        """List those of some texts that it wrote."""
        return [text for text in texts if text in self.output]

    @property
    def complaints(self):
        """What MPI or the interpreter complained of."""
        return self.complains_of((*ABORTS, *CRASHES))


@dataclass
class Outcome:
    """What one of the twins left, by rank."""

    ranks: list
    output: str

    @property
    def hung(self):
        """Whether any rank had to be cut."""
        return any(rank.hung for rank in self.ranks)

    @property
    def delivered(self):
        """Whether the withheld sample state arrived, whole."""
        return self.ranks[0].events.get("received", {}).get("right", False)

    @property
    def aborted(self):
        """Whether MPI or its launcher ended the job."""
        return any((rank.code is None and not rank.hung) or rank.complains_of(ABORTS) for rank in self.ranks)

    @property
    def abandoned(self):
        """How many sends the patch said it gave up."""
        return sum(len(re.findall(r"abandoned the send in", rank.output)) for rank in self.ranks)


def run(cell, patched, **environment):
    """Live through a cell on its ranks, and return what came of it."""
    with tempfile.TemporaryDirectory(prefix="twin-") as folder:
        environment = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))} | environment
        if cell.receiver in ("killed", "raises") or cell.end.startswith("exception"):
            environment["SURVIVE"] = "1"
        life = (HERE / "life.py", json.dumps(cell.describe()), "patched" if patched else "unpatched")
        line = (HERE / "warden.py", folder, cell.limit_s, *life)
        done = on_ranks(cell.ranks, int(cell.limit_s + 2 * STARTED_S), *line, **environment)
        return Outcome([_rank(folder, number) for number in range(cell.ranks)], done.stdout)


def _rank(folder, number):
    role, path = "another rank" if number else "the receiver", Path(folder, f"rank-{number}")
    record, output = path.with_suffix(".jsonl"), path.with_suffix(".txt")
    if not record.exists():
        return Rank(role, {}, "")
    return Rank(role, read(record), output.read_text(errors="replace") if output.exists() else "")
