"""One rank raises while the others wait for it.

Usage: one_fails.py guarded|bare
"""

import contextlib
import sys

from mpi4py import MPI

from trtllm_pp_progress.tools.job.world import abort_on_failure

comm = MPI.COMM_WORLD
with abort_on_failure(comm) if sys.argv[1] == "guarded" else contextlib.nullcontext():
    if comm.rank == 1:
        raise RuntimeError("this rank fails")
    comm.recv(source=1)
