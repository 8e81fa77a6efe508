"""The rank after the first of three is killed while a send of 1 MB to it is outstanding; then the others shut down.

Usage: killed.py POLICY DEADLINE_S    Ends without MPI_Finalize, which cannot do without the dead rank.
"""

import os
import signal

from common import Forgetful, arguments, await_send, begin, close, succeed
from rings import executor_of, generate, until

from trtllm_pp_progress.tools.host import Dist, PPCommTag

STEPS = 4
SIZE = 1_000_000


class Counting(Dist):
    """Counts what comes from the victim in each step last of all: a rank that waits for that one waits for ever."""

    told = 0

    def recv_object(self, src, tag):
        """Receive, and count."""
        received = super().recv_object(src, tag)
        self.told += tag == PPCommTag.EXECUTED_BATCH_NUM
        return received


def main():
    """Run one executor on every rank."""
    policy, deadline = arguments()
    comm, line = begin()
    victim = comm.rank == 1
    dist = Forgetful(comm, STEPS - 1) if victim else Counting(comm)
    settings = {"drain_deadline_s": float(deadline)}
    with executor_of(comm, policy, payload_bytes=SIZE, reentry_s=0.005, dist=dist, settings=settings) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
            await_send(executor, STEPS - 1)
            line.tell(1)
        if comm.rank == 2:
            until(lambda: dist.told == STEPS)
            line.tell(1)
        if victim:
            line.hear(0)
            line.hear(2)
            os.kill(os.getpid(), signal.SIGKILL)
        seconds = close(executor)
        succeed(executor, seconds)
        for peer in {*range(comm.size)} - {1, comm.rank}:  # a rank that ends takes its connections with it
            line.tell(peer)
        for peer in {*range(comm.size)} - {1, comm.rank}:
            line.hear(peer)
        os._exit(0)


main()
