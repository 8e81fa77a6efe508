"""The program ends with a send parked and the executor up.

Usage: exits_early.py POLICY exit|finalize
"""

import sys
import time

from common import Forgetful, arguments, await_send, begin, say
from mpi4py import MPI
from rings import executor_of, generate

from trtllm_pp_progress.tools.host import Dist

STEPS = 4


def main():
    """Leave rank 1, whose relay is at work on a send that nobody takes and whose executor is outside MPI, as told."""
    policy, way = arguments()
    comm, line = begin()
    dist = Forgetful(comm, STEPS - 1) if comm.rank == 0 else Dist(comm)
    context = executor_of(comm, policy, payload_bytes=1_000_000, reentry_s=None, dist=dist)
    executor = context.__enter__()
    if comm.rank == 0:
        generate(executor, STEPS)
    else:
        await_send(executor, STEPS - 1)
        say("a send is parked")
    line.meet()
    if way == "finalize":
        MPI.Finalize()
        line.meet()
    say("leaves at", time.time())
    sys.exit(0)


main()
