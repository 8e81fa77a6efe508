"""What scenarios put in a relay's way: an executor that holds the GIL, a main thread that talks to a neighbour."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from trtllm_pp_progress.tools.host import Dist, PPCommTag

__all__ = ["PostingDist", "exchange", "hold_gil"]

PAUSE_S = 0.002  # between two exchanges: the main thread is a guest, not the load
NAP_S = 0.75 * PAUSE_S  # and the one who answers need not wait inside MPI, spinning, all the time
GO_ON, STOP = b"g", b"s"

_usleep = ctypes.PyDLL(None).usleep  # PyDLL: a native call that keeps the GIL


def hold_gil(seconds: float) -> None:
    """Block natively with the GIL held, as a cold kernel load does: no other Python thread runs meanwhile."""
    _usleep(int(seconds * 1e6))


class PostingDist(Dist):
    """A Dist that says when this rank's part of a relay is posted: sent on, or received where nothing is sent on."""

    def __init__(self) -> None:
        super().__init__()
        self._posted = threading.Semaphore(0)

    def isend_object(self, value: Any, dest: int, tag: int) -> Any:
        """Start sending, and note a sample state as soon as the call returns: before anybody can test it."""
        handle = super().isend_object(value, dest, tag)
        if tag == PPCommTag.SAMPLE_STATE:
            self._posted.release()
        return handle

    def recv_object(self, src: int, tag: int) -> Any:
        """Receive, and note a sample state that ends its way here."""
        value = super().recv_object(src, tag)
        if tag == PPCommTag.SAMPLE_STATE and self.is_second_last_pp_rank:
            self._posted.release()
        return value

    def await_posted(self, reentry_s: float | None) -> None:
        """Wait outside MPI for the next one, entering MPI once a re-entry period."""
        while not self._posted.acquire(timeout=reentry_s):
            self.touch()


def exchange(comm: Any, done: Callable[[], bool]) -> list[float]:
    """Exchange one byte with a neighbour (ranks 0 and 1, 2 and 3, ...) again and again until `done()` on the even rank.

    Returns the even rank's round trips, halved, in milliseconds. What is parked is made to progress with each exchange,
    whatever the relay does; a rank without a neighbour returns at once.
    """
    rank = comm.Get_rank()
    neighbour = rank ^ 1
    if neighbour >= comm.Get_size():
        return []
    word, trips = bytearray(1), []
    while rank > neighbour and word != STOP:
        comm.Recv([word, MPI.BYTE], source=neighbour)
        comm.Send([word, MPI.BYTE], dest=neighbour)
        time.sleep(NAP_S)
    while rank < neighbour and word != STOP:
        said = STOP if done() else GO_ON
        started = time.perf_counter()
        comm.Send([said, MPI.BYTE], dest=neighbour)
        comm.Recv([word, MPI.BYTE], source=neighbour)
        trips.append((time.perf_counter() - started) / 2 * 1e3)
        time.sleep(PAUSE_S)
    return trips
