"""The rank after the first of three is killed while a send of 1 MB to it is outstanding; then the others shut down.

Usage: killed.py POLICY DEADLINE_S    Ends without MPI_Finalize, which cannot do without the dead rank.
"""

import os
import signal

from common import Forgetful, arguments, await_send, begin, close, succeed
from rings import executor_of, generate

from trtllm_pp_progress.host import Dist

STEPS = 4
SIZE = 1_000_000


def main():
    """Run one executor on every rank."""
    policy, deadline = arguments()
    comm, line = begin()
    victim = comm.rank == 1
    dist = Forgetful(comm, STEPS - 1) if victim else Dist(comm)
    settings = {"drain_deadline_s": float(deadline)}
    with executor_of(comm, policy, payload_bytes=SIZE, reentry_s=0.005, dist=dist, settings=settings) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
            await_send(executor, STEPS - 1)
            line.tell(1)
        if victim:
            line.hear(0)
            os.kill(os.getpid(), signal.SIGKILL)
        seconds = close(executor)
        succeed(executor, seconds)
        for peer in {*range(comm.size)} - {1, comm.rank}:  # a rank that ends takes its connections with it
            line.tell(peer)
        for peer in {*range(comm.size)} - {1, comm.rank}:
            line.hear(peer)
        os._exit(0)


main()
