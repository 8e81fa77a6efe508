"""The fallback without a compiler: a Python thread parked in a blocking MPI receive while a send is pending.

A thread that sits in MPI with the GIL released drives every pending send, whatever another thread does with the GIL. It
costs what the native understudy does not: it spins on a core while a send is pending, competes with the relay for the
lock of the progress engine, and takes the GIL twice each time sends become pending, which the driver waits for.
"""

from __future__ import annotations

import atexit
import sys
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from trtllm_pp_progress._understudy import EXIT_TIMEOUT_S, SILENCE_S, guard_exits, private_comm

__all__ = ["Parked"]

TAG = 1  # on a communicator of our own: nobody else sends on it


class Parked:
    """Drive MPI from a Python thread while a send is pending; same interface as Understudy.

    Raises UnderstudyUnavailable with the reason when it cannot run. Once the GIL is held it is too late to step in, so
    the first `driven` of a pending send waits, up to `silence_s`, until the thread is on its way into MPI: the executor
    would take the GIL first. `period_s` is not used.
    """

    def __init__(self, silence_s: float = SILENCE_S, period_s: float = 0.0, comm: Any = None) -> None:
        """Start the thread; `comm` is for tests (default: a private duplicate of COMM_SELF)."""
        self._comm = private_comm() if comm is None else comm
        self._byte = b"\0"  # sent by freed requests: lives as long as this object
        self._orders: SimpleQueue[bool] = SimpleQueue()
        self._entering: SimpleQueue[bool] = SimpleQueue()
        self._silence_s = silence_s
        self._turn = threading.Lock()  # stop() comes at any time, from any thread
        self._armed = self._stopping = False
        self._stopped = ""
        self._failed = ""
        self.ticks = 0
        self._thread = threading.Thread(target=self._run, name="pp-parked", daemon=True)
        self._thread.start()
        guard_exits(self)

    # One order for each receive and one byte for each order: a thread that comes late finds its byte already there, so
    # no wake-up can be lost and none has to be timed.

    def _run(self) -> None:
        received = bytearray(1)
        try:
            while self._orders.get():
                self.ticks += 1
                self._entering.put(True)  # keeps the GIL: the driver goes on once Recv has let go of it
                self._comm.Recv(received, source=0, tag=TAG)
        except Exception as error:  # MPI is broken: say so in status(), not on stderr in the middle of serving
            self._failed = f"failed ({error})"

    def driven(self) -> None:
        """Note that a send is pending: the thread parks in MPI; waits for that when nothing was pending before."""
        with self._turn:
            if self._armed or self._stopping or self._failed:
                return
            self._armed = True
            with suppress(Empty):
                while True:  # left by a thread that came late
                    self._entering.get_nowait()
            self._orders.put(True)
        with suppress(Empty):
            self._entering.get(timeout=self._silence_s)

    def receiving(self) -> None:
        """Do nothing: the thread is in MPI anyway."""

    def idle(self) -> None:
        """Note that nothing is pending: a one-byte send to ourselves releases the thread."""
        with self._turn:
            if self._armed:
                self._armed = False
                if not self._stopped and not _finalized():
                    self._comm.Isend(self._byte, dest=0, tag=TAG).Free()

    def stop(self, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
        """Join the thread; return False if it has not left MPI within the timeout. Safe at any time, repeatedly."""
        if not self._stopped:
            self._stopping = True
            self.idle()  # an order given before is released, and none is given after
            self._orders.put(False)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            with self._turn:
                free, self._stopped = not self._stopped, "stopped"  # two threads may stop it at once
            if free and not _finalized():
                self._comm.Free()
            atexit.unregister(self.stop)
        return True

    @property
    def state(self) -> str:
        """One of idle, armed, stopped, off after fork, or failed with the reason."""
        return self._failed or self._stopped or ("armed" if self._armed else "idle")

    def forked(self) -> None:
        """Stay off in a forked child: the thread did not come along, and MPI is not to be used here."""
        self._stopped, self._stopping = "off after fork", True
        self._turn = threading.Lock()  # the parent's may have been held


def _finalized() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")  # absent in tests that bring their own communicator
    return mpi is not None and bool(mpi.Is_finalized())
