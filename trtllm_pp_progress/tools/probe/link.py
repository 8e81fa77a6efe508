"""What two ranks measure together: one sends, one receives, and the receiver's clock tells how long it had to wait.

Messages are pickled objects over pkl5, as the relay's are, and `size` is what the largest of them has on the wire: a
small header travels before it, and from 256 KiB on the object's buffer goes out-of-band, in a message of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from trtllm_pp_progress.progress.handles import pkl5_complete
from trtllm_pp_progress.progress.waits import pauses
from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.tools.job.carrier import carrier, counted
from trtllm_pp_progress.tools.job.payload import OUT_OF_BAND, Buffer

__all__ = ["Link", "Timing", "WrongPayload"]

GO, PAYLOAD, RESULT = 1, 2, 3  # tags
TRIALS = 3
LATE_S = 0.02  # a receiver that is busy elsewhere when the message is announced
AWAY_S = 0.15  # the sender's absence beyond that, at least
ABSENCES = 4  # and in times of what the transfer takes while both are there
EAGER_S, EAGER_BYTES_PER_S = 0.03, 100e6  # a send that is eager completes in this time although nobody receives it


class WrongPayload(RuntimeError):
    """What was received is not what was sent."""


@dataclass
class Timing:
    """One size on one link; medians, in milliseconds."""

    bytes: int
    wire_ms: float  # both inside MPI: from the receive to its end
    isend_ms: float  # inside isend itself, with the receiver late
    away_ms: float  # how long the sender was outside MPI once the receive was posted
    waited_ms: float  # and how long that receive took
    moves: bool  # whether it ended without the sender
    driven_ms: float  # the same receive with a sender that tests in bursts, as the patch does
    polls: float  # and how many tests that took


def payload(size: int) -> Buffer:
    """Return an object whose pickle, or whose out-of-band buffer, has `size` bytes; the smallest pickle has more."""
    rest = size if size >= OUT_OF_BAND else max(0, 2 * size - len(pkl5.pickle.dumps(Buffer(size))))
    return Buffer(random.Random(size).randbytes(rest))


class Link:
    """One direction between two ranks; both call the same methods in the same order, others call none."""

    def __init__(self, comm: pkl5.Intracomm, sender: int, receiver: int, settings: Settings) -> None:
        self.sender, self.receiver = sender, receiver
        self._comm, self._settings = comm, settings
        self._sends = comm.Get_rank() == sender
        self._peer = receiver if self._sends else sender

    def read(self, size: int) -> Timing:
        """Measure one size; both ranks return the same. Raises WrongPayload."""
        wire = self._median(size, 0.0, self._stay)[1]
        away_s = LATE_S + max(AWAY_S, ABSENCES * wire * 1e-3)

        def leave(request: Any) -> int:
            time.sleep(away_s)
            return self._stay(request)

        isend, waited, _ = self._median(size, LATE_S, leave)
        _, driven, polls = self._median(size, 0.0, self._drive)
        away = (away_s - LATE_S) * 1e3
        return Timing(size, wire, isend, away, waited, waited < (wire + away) / 2, driven, polls)

    def carrier(self, size: int, same_host: bool) -> str:
        """Return what carries messages of this size, by the kernel's count on the receiver; both ranks get the same."""
        before = counted()
        for _ in range(TRIALS):
            self._transfer(size, 0.0, self._stay)
        if self._sends:
            return str(self._comm.recv(None, self._peer, RESULT))
        found = carrier(before, counted(), TRIALS * size, same_host)
        self._comm.send(found, self._peer, RESULT)
        return found

    def edge(self, largest: int, trying: Callable[[int], object]) -> int | None:
        """Return the smallest size that completes only once it is received (rendezvous); None: not up to `largest`.

        Plain buffers, by bisection: between two sizes of a kind nothing else is looked for. `trying` hears each size.
        """

        def eager(size: int) -> bool:
            trying(size)
            # A rendezvous never completes on its own; a slow machine may be late with an eager send: so ask twice.
            return any(self._completes_alone(size) for _ in range(2))

        if eager(largest):
            return None
        low, high = 0, largest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if eager(middle) else (low, middle)
        return high

    def _median(self, size: int, late_s: float, behave: Callable[[Any], int]) -> list[float]:
        trials = [self._transfer(size, late_s, behave) for _ in range(TRIALS)]
        return [statistics.median(values) for values in zip(*trials, strict=True)]

    def _transfer(self, size: int, late_s: float, behave: Callable[[Any], int]) -> tuple[float, float, float]:
        """Return ms in isend, ms the receive took, and polls."""
        comm, peer, sent = self._comm, self._peer, payload(size)
        word = bytearray(1)
        if self._sends:
            comm.Recv([word, MPI.BYTE], peer, GO)
            started = time.perf_counter()
            request = comm.isend(sent, peer, PAYLOAD)
            isend = (time.perf_counter() - started) * 1e3
            polls = behave(request)
            comm.send((isend, polls), peer, RESULT)
            took = comm.recv(None, peer, RESULT)
        else:
            comm.Send([word, MPI.BYTE], peer, GO)
            time.sleep(late_s)
            started = time.perf_counter()
            received = comm.recv(None, peer, PAYLOAD)
            took = (time.perf_counter() - started) * 1e3
            isend, polls = comm.recv(None, peer, RESULT)
            comm.send(took if received == sent else None, peer, RESULT)
            took = took if received == sent else None
        if took is None:
            raise WrongPayload(f"{size:,} bytes from rank {self.sender} to {self.receiver} were not what was sent")
        return isend, took, polls

    @staticmethod
    def _stay(request: Any) -> int:
        request.wait()
        return 0

    def _drive(self, request: Any) -> int:
        polls, pause_for = 0, pauses(self._settings, time.monotonic)
        while True:
            for _ in range(self._settings.max_polls):
                polls += 1
                if pkl5_complete(request):
                    return polls
            time.sleep(next(pause_for))

    def _completes_alone(self, size: int) -> bool:
        comm, peer, buffer = self._comm, self._peer, bytearray(size)
        word = bytearray(1)
        if self._sends:
            comm.Recv([word, MPI.BYTE], peer, GO)
            request = comm.Isend([buffer, MPI.BYTE], peer, PAYLOAD)
            deadline = time.monotonic() + EAGER_S + size / EAGER_BYTES_PER_S
            while not (done := request.Test()) and time.monotonic() < deadline:
                pass
            word[0] = done
            comm.Send([word, MPI.BYTE], peer, RESULT)
            request.Wait()
        else:
            comm.Send([word, MPI.BYTE], peer, GO)
            while not comm.Iprobe(peer, RESULT):  # takes in what is eager
                pass
            comm.Recv([word, MPI.BYTE], peer, RESULT)
            comm.Recv([buffer, MPI.BYTE], peer, PAYLOAD)
        return bool(word[0])
