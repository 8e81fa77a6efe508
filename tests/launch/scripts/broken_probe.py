"""A probe whose rank 1 fails in its second size: python broken_probe.py HOW PROBE-ARGUMENTS..."""

import ctypes
import os
import signal
import sys

from trtllm_pp_progress import cli
from trtllm_pp_progress.tools.probe import start as _start

HOW = sys.argv.pop(1)
FAIL = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "held": lambda: ctypes.PyDLL(None).sleep(600),
    "raises": lambda: 1 / 0,
}
real_guard = _start.guard


def guard(*args):
    """Become a rank, then break what it measures."""
    steps = real_guard(*args)
    from mpi4py import MPI

    from trtllm_pp_progress.tools.probe.link import Link

    real_read = Link.read

    def read(link, size):
        if size == 100_000 and MPI.COMM_WORLD.Get_rank() == 1:
            FAIL[HOW]()
        return real_read(link, size)

    Link.read = read
    return steps


_start.guard = guard
cli.main(["probe", *sys.argv[1:]])
