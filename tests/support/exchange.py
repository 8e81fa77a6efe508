"""Messages round a ring of ranks, sent through one engine, in each of the ways to send."""

import weakref

import numpy as np
from mpi4py import MPI
from mpi4py.util import pkl5
from outside import LIMIT_S

from trtllm_pp_progress.mpi.cores import crowded
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.settings.core import Settings

TAG = 5


def never():
    """Fail: nobody may block in MPI."""
    raise AssertionError("the blocking wait was used")


class Exchange:
    """One engine, one table of 1,024 slots, and messages to the right and from the left in one of the ways to send."""

    def __init__(self, comm, way="pickle", deadline=LIMIT_S, mode="poll"):
        """`way` is pickle (bytes), array (numpy, pickled), buffer (MPI.Request) or list (of two MPI.Request)."""
        self.comm, self.way = pkl5.Intracomm(comm), way
        self.right, self.left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self.engine = Engine(Settings(drain_deadline_s=deadline, mode=mode), Log(lambda: (comm.rank, self.right)))
        self.engine.driver.start(crowded())
        self.table = self.engine.table("send_handles", [None] * 1024)

    def wait(self, slot):
        """Wait for a slot; a handle that can be tested must not get upstream's own blocking wait."""
        wait_for_slot(self.engine, self.table, slot, never)

    @property
    def counters(self):
        """Return the table's counters."""
        return self.engine.status()["tables"]["send_handles"]

    @staticmethod
    def data(seed, size):
        """Return `size` bytes that depend on a seed, as an array."""
        return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)

    def post(self, slot, seed, size):
        """Start a send that only the table refers to, and return a weak reference to its array."""
        array = self.data(seed, size)
        if self.way == "buffer":
            handle = MPI.Intracomm.Isend(self.comm, array, self.right, TAG)
        elif self.way == "list":
            half = size // 2
            handle = [MPI.Intracomm.Isend(self.comm, part, self.right, TAG) for part in (array[:half], array[half:])]
        else:
            handle = self.comm.isend(array.tobytes() if self.way == "pickle" else array, self.right, TAG)
        self.table[slot] = handle
        return weakref.ref(array)

    def receive(self, size):
        """Return the bytes of the next message from the left."""
        if self.way in ("pickle", "array"):
            return bytes(self.comm.recv(source=self.left, tag=TAG))
        sizes = [size // 2, size - size // 2] if self.way == "list" else [size]
        parts = [np.empty(part, np.uint8) for part in sizes]
        for part in parts:
            MPI.Intracomm.Recv(self.comm, part, self.left, TAG)
        return b"".join(map(bytes, parts))

    def assert_received(self, seed, size):
        """Assert that the next message from the left is, byte for byte, what was sent."""
        assert self.receive(size) == self.data(seed, size).tobytes()
