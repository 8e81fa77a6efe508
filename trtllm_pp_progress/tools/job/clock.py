"""What the monotonic clock of the rank before shows, in the time of this one.

Clocks of two hosts have nothing in common but their pace, and that only nearly: how far one is ahead is read from round
trips over the link between the two, before and after a measurement. Half the shortest round trip is the most that a
reading can be off, if all of it was spent one way.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any

import click

from trtllm_pp_progress.tools.job.options import BAD_INPUT
from trtllm_pp_progress.tools.job.ranks import quiet_barrier

__all__ = ["PreviousClock", "Reading", "read_previous", "require_one_clock"]

FEWEST, MOST, MAX_S = 5, 50, 0.2  # round trips of a reading, and how long more than the fewest may take
MORE, LAST = b"m", b"l"


@dataclass(frozen=True)
class Reading:
    """At a moment of this rank's clock the other's was so far ahead, give or take the error; all in seconds."""

    at: float
    ahead: float
    error: float


@dataclass(frozen=True)
class PreviousClock:
    """The clock of the rank before, from a reading before a measurement and one after it."""

    before: Reading
    after: Reading

    @property
    def same(self) -> bool:
        """Whether it is this rank's own: nothing that was read speaks against it."""
        return all(abs(reading.ahead) <= reading.error for reading in (self.before, self.after))

    @property
    def error(self) -> float:
        """The most that here() can be off, in seconds."""
        return 0.0 if self.same else max(self.before.error, self.after.error)

    @property
    def drift(self) -> float:
        """By how much it was seen to gain on this rank's, in seconds a second; 0 where that is within the errors."""
        seen = abs(self.after.ahead - self.before.ahead) > self.before.error + self.after.error
        return self._gain() if seen and not self.same else 0.0

    def here(self, there: float) -> float:
        """Return a moment of that clock as one of this rank's."""
        if self.same:
            return there
        return there - self.before.ahead - self._gain() * (there - self.before.ahead - self.before.at)

    def _gain(self) -> float:
        return (self.after.ahead - self.before.ahead) / (self.after.at - self.before.at)


def read_previous(comm: Any) -> Reading:
    """Read the clock of the rank before; collective, on the main thread, the links one after the other."""
    rank, size = comm.Get_rank(), comm.Get_size()
    reading = Reading(time.monotonic(), 0.0, 0.0)
    for asking in range(size):
        answering = (asking - 1) % size
        if rank == asking != answering:
            reading = _ask(comm, answering)
        elif rank == answering != asking:
            _answer(comm, asking)
        quiet_barrier(comm)
    return reading


def require_one_clock(comm: Any, what: str) -> None:
    """End every rank with exit code 2, and one line on rank 0, where they do not share a clock; `what` needs one."""
    reading = read_previous(comm)
    apart = max(comm.allgather(0.0 if abs(reading.ahead) <= reading.error else abs(reading.ahead)))
    if apart:
        if comm.Get_rank() == 0:
            click.echo(
                f"Error: {what} compares moments of different ranks, whose clocks are up to {apart:.3g} s apart here: "
                "run it on one machine",
                err=True,
            )
        raise SystemExit(BAD_INPUT)


def _ask(comm: Any, peer: int) -> Reading:
    from mpi4py import MPI

    readings: list[Reading] = []
    answer = bytearray(8)
    ends = time.monotonic() + MAX_S
    last = False
    while not last:
        last = len(readings) + 1 >= (FEWEST if time.monotonic() > ends else MOST)
        asked = time.monotonic()
        comm.Send([LAST if last else MORE, MPI.BYTE], peer)
        comm.Recv([answer, MPI.BYTE], peer)
        answered = time.monotonic()
        middle, error = (asked + answered) / 2, (answered - asked) / 2
        readings.append(Reading(middle, struct.unpack("d", answer)[0] - middle, error))
    return min(readings, key=lambda reading: reading.error)


def _answer(comm: Any, peer: int) -> None:
    from mpi4py import MPI

    word = bytearray(1)
    while word != LAST:
        comm.Recv([word, MPI.BYTE], peer)
        comm.Send([struct.pack("d", time.monotonic()), MPI.BYTE], peer)
