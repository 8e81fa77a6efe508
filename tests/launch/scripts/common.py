"""What the scripts share: a deadline for a shutdown, and a receiver that does not take the last sample state."""

import contextlib
import faulthandler
import os
import sys
import time

from mpi4py import MPI
from outside import Line
from rings import until

from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.tools.host import Dist, PPCommTag, Sampled

RANK = MPI.COMM_WORLD.Get_rank()


def begin():
    """Return a communicator and a line."""
    comm = MPI.COMM_WORLD.Dup()
    return comm, Line(comm)


def say(*words):
    """Print one line of this rank at once."""
    os.write(1, (" ".join(map(str, (f"rank {RANK}:", *words))) + "\n").encode())


def succeed(executor, seconds):
    """Print the line that a test looks for: how long the shutdown took and how many sends it gave up."""
    engine = engine_of(executor)
    abandoned = engine.abandoned if engine else []
    for kept in abandoned:
        say(f"gave up {kept.table}[{kept.slot}] to rank {kept.peer} after {kept.age_s:.1f} s")
    say(f"closed in {seconds:.2f} s, {len(abandoned)} abandoned")
    say("leaves at", time.time())


def await_send(executor, slot):
    """Return once a send is in a slot of the relay's table, without entering MPI."""
    until(lambda: executor.send_handles[slot] is not None)


@contextlib.contextmanager
def limited(early_s=0.0):
    """Run a block; its deadline shows the stacks and ends the job.

    The first rank to do so keeps the others from showing theirs: one whose stacks matter shows them `early_s` before.
    """
    faulthandler.dump_traceback_later(float(os.environ["SHUTDOWN_LIMIT_S"]) - early_s, exit=not early_s)
    yield
    faulthandler.cancel_dump_traceback_later()


def close(executor):
    """Shut an executor down within the deadline, and return the seconds it took."""
    started = time.monotonic()
    with limited():
        executor.shutdown()
    return time.monotonic() - started


class Forgetful(Dist):
    """A receiver that leaves early: the sample states from `step` on come by other means, it never receives them."""

    def __init__(self, comm, step):
        super().__init__(comm)
        self._step, self._received = step, 0
        self.relay_comm = None

    def set_thread_local_comm(self, comm):
        """Note the relay's communicator."""
        self.relay_comm = comm
        super().set_thread_local_comm(comm)

    def recv_object(self, src, tag):
        """Receive, but for those sample states."""
        if tag == PPCommTag.SAMPLE_STATE:
            step, self._received = self._received, self._received + 1
            if step >= self._step:
                return Sampled([step], b"", step, time.monotonic()), []
        return super().recv_object(src, tag)


def arguments():
    """Return the script's arguments."""
    return sys.argv[1:]
