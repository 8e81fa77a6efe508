"""MPI as the executor sees it: pickled objects between neighbours of the pipeline, over pkl5, as upstream does it."""

from __future__ import annotations

import enum
import threading
import time
from typing import Any

__all__ = ["Dist", "PPCommTag"]


class PPCommTag(enum.IntEnum):
    """Message tags, with upstream's values."""

    SCHEDULE_RESULT = 20001
    EXECUTED_BATCH_NUM = 20002
    SAMPLE_STATE = 20003
    MPI_PROGRESS_PROBE = 20100  # never sent


class Dist:
    """The pipeline's ranks and their messages. The communicator depends on the calling thread, as upstream's does.

    `entries` are the moments (monotonic seconds) at which the executor thread entered MPI; from them comes its re-entry
    period, which decides how long a parked send waits.
    """

    def __init__(self, comm: Any = None) -> None:
        from mpi4py import MPI  # only here: the names of the relays are of use where there is no MPI
        from mpi4py.util import pkl5

        self._any_source = MPI.ANY_SOURCE
        self.comm = pkl5.Intracomm(MPI.COMM_WORLD if comm is None else comm)
        self.pp_size, self.pp_rank = self.comm.Get_size(), self.comm.Get_rank()
        self.next_pp_rank = (self.pp_rank + 1) % self.pp_size
        self.prev_pp_rank = (self.pp_rank - 1) % self.pp_size
        self.is_first_pp_rank = self.pp_rank == 0
        self.is_last_pp_rank = self.pp_rank == self.pp_size - 1
        self.is_second_last_pp_rank = self.pp_rank == self.pp_size - 2
        self.entries: list[float] = []
        self._of_thread = threading.local()

    def set_thread_local_comm(self, comm: Any) -> None:
        """Let the calling thread use `comm`; None gives it the main communicator again."""
        self._of_thread.comm = comm

    def _enter(self) -> Any:
        if (comm := getattr(self._of_thread, "comm", None)) is not None:
            return comm
        self.entries.append(time.monotonic())
        return self.comm

    def isend_object(self, value: Any, dest: int, tag: int) -> Any:
        """Start sending a pickled object; the handle keeps the pickle alive until it is complete."""
        return self._enter().isend(value, dest=dest, tag=tag)

    def recv_object(self, src: int, tag: int) -> Any:
        """Receive a pickled object, blocking inside MPI."""
        return self._enter().recv(source=src, tag=tag)

    def await_message(self, src: int, tag: int) -> None:
        """Wait inside MPI until a message has been announced, without receiving it."""
        self._enter().Probe(source=src, tag=tag)

    def touch(self) -> None:
        """Enter MPI and leave at once, which makes pending operations of this process progress."""
        self._enter().Iprobe(source=self._any_source, tag=PPCommTag.MPI_PROGRESS_PROBE)
