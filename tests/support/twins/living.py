"""What a rank does: a double is used, then its last sample state waits for rank 0, and all end as the cell says."""

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time

from doubles import MPIDist, Request, executor_class, set_mpi_comm
from doubles.world import PPCommTag, mpi_comm
from mpi4py import MPI
from mpi4py.util import pkl5
from outside import Line

import trtllm_pp_progress
from trtllm_pp_progress.tools.host import RingStage, Sampled, connect_pipeline
from twins.cells import Cell
from twins.record import note

STEPS = 4
COMPUTE_S = 0.0002
LIMIT_S = 60.0
HELD_FROM_S = 0.2  # after the end began
FINALIZE_FROM_S = 0.3


class Withholding(MPIDist):
    """Rank 0 gets the last sample state by other means; it may receive the message later, or never."""

    def __init__(self, size, rank, last):
        super().__init__(size, rank)
        self._last, self._received, self.sent = last, 0, []
        self.relay_comm = None

    def isend_object(self, obj, dest, tag=0):
        """Send, and keep the requests of the sample states."""
        request = super().isend_object(obj, dest, tag)
        if tag == PPCommTag.SAMPLE_STATE:
            self.sent.append(request)
        return request

    def recv_object(self, src, tag=0):
        """Receive, but for the last sample state."""
        if tag == PPCommTag.SAMPLE_STATE and self.is_first_pp_rank and self._last is not None:
            self._received += 1
            if self._received == STEPS:
                self.relay_comm = mpi_comm()
                return self._last, [[STEPS - 1]]
        return super().recv_object(src, tag)


class Owner:
    """Owns an executor, in a circle, and shuts it down when it is collected."""

    def __init__(self, executor):
        self._executor, self._circle = executor, self

    def __del__(self):
        self._executor.shutdown()


class Life:
    """One rank's life; `executors` is what `shut_down()` shuts down."""

    def __init__(self, cell, patched, executors, shut_down):
        self.cell, self.patched, self.executors, self.shut_down = cell, patched, executors, shut_down
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

    def use(self):
        """Generate all tokens; the last sample state is on its way then."""
        cell, comm = self.cell, MPI.COMM_WORLD
        era, _, mode = cell.era.partition("-")
        if era in ("F", "G", "H"):
            os.environ["TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE"] = str(int(mode == "async"))
        cls = executor_class(era)
        if self.patched:
            trtllm_pp_progress.install(cls, drain_deadline_s=cell.deadline_s)
        set_mpi_comm(pkl5.Intracomm(comm.Dup()))
        self.line, stage = Line(comm), RingStage(*connect_pipeline(comm), COMPUTE_S, cell.nbytes or 1)
        self.last = Sampled([STEPS - 1], stage._payloads[(STEPS - 1) % len(stage._payloads)], STEPS - 1)
        dist = Withholding(self.size, self.rank, None if cell.nbytes is None else self.last)
        self.executor = executor = cls(dist, stage)
        if self.rank == 0 and cell.receiver == "raises":
            loop = executor.event_loop
            executor.event_loop = lambda: fail_after(loop)
        executor.start_worker()
        self.executors.append(executor)
        if self.rank == 0:
            executor.enqueue_requests([Request(0, STEPS)])
            (request,) = executor.await_responses(1, LIMIT_S)
            note("tokens", tokens=request.tokens)
        elif self.rank == self.size - 1:
            until(self._is_posted)
        self.line.meet()

    def _is_posted(self):
        """Whether the last sample state is where upstream keeps it, or complete."""
        sent = self.executor.dist.sent
        return len(sent) == STEPS and (
            any(handle is sent[-1] for handle in self.executor.send_handles)
            or all(part == MPI.REQUEST_NULL for part in sent[-1])
        )

    def receive(self):
        """Be the receiver, whose executor ends in time."""
        cell, dist = self.cell, self.executor.dist
        self.shut_down()
        if cell.receiver == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif cell.receiver == "stopped":
            subprocess.Popen(["sh", "-c", f"sleep {cell.late_s}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif cell.receiver == "late":
            time.sleep(cell.late_s)
        if cell.receiver in ("late", "stopped") and dist.relay_comm is not None:
            note("receives")
            host, _ = dist.relay_comm.recv(source=dist.prev_pp_rank, tag=PPCommTag.SAMPLE_STATE)
            note("received", right=host == self.last)
        for peer in range(1, self.size):
            self.line.tell(peer)
        if cell.receiver == "raises":
            raise RuntimeError("the receiver fails")

    def end(self):
        """End as the cell says; what is left is the interpreter's."""
        way = self.cell.end
        if way in ("shutdown", "shutdown, lives on"):
            self.shut_down()
            if way == "shutdown, lives on" and self.cell.receiver not in ("on time", "killed"):
                self.line.hear(0)
        elif way == "at exit, registered last":
            atexit.register(self.shut_down)
        elif way == "signal":
            signal.signal(signal.SIGTERM, self._told_to_end)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LIMIT_S)
        elif way == "exception":
            raise RuntimeError("the program fails")
        elif way == "exception in with":
            try:
                raise RuntimeError("the program fails")
            finally:
                self.shut_down()
        elif way == "finalize":
            MPI.Finalize()
        elif way == "finalize in shutdown":
            threading.Thread(target=self.shut_down, daemon=True).start()
            time.sleep(FINALIZE_FROM_S)
            MPI.Finalize()
        elif way == "collected":
            self.executor = None
            Owner(self.executors.pop())
            gc.collect()
            note("closed")

    def _told_to_end(self, signum, frame):
        self.shut_down()
        sys.exit(0)

    def hold_the_gil(self):
        """Keep every other thread of this process from Python until the receiver has had time to come."""

        def hold():
            time.sleep(HELD_FROM_S)
            ctypes.PyDLL(None).usleep(int(self.cell.held_s * 1e6))

        threading.Thread(target=hold, daemon=True).start()


def fail_after(loop):
    """Fail where upstream's loop ends."""
    loop()
    raise RuntimeError("the receiver's executor fails")


def until(condition):
    """Return once a condition holds, without entering MPI."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.001)


def live(cell, patched, executors, shut_down):
    """Live, and end."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    life = Life(Cell(**cell), patched, executors, shut_down)
    life.use()
    note("ends")
    if life.rank == 0 and life.cell.receiver != "on time":
        life.receive()
        return
    if life.cell.gil == "held" and life.rank == life.size - 1:
        life.hold_the_gil()
    life.end()
