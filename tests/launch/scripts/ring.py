"""A ring that serves until it is told to end; nothing in it knows of the patch, which the environment turns on.

Usage: ring.py FOLDER       each rank writes how many sends it made by when, and ends once FOLDER/end is there
"""

import json
import sys
import threading
import time
from pathlib import Path

from mpi4py import MPI
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

from trtllm_pp_progress.tools.host import Dist, Request, RingStage, connect_pipeline

PAYLOAD, COMPUTE_S, LATE_S, REENTRY_S = 1_000_000, 0.002, 0.01, 0.25
PERIOD_S = 0.02
LIMIT_S = 300


class Counting(Dist):
    """Counts what it sends."""

    sent = 0

    def isend_object(self, *arguments, **options):
        """Send."""
        self.sent += 1
        return super().isend_object(*arguments, **options)


def count(dist, counts, end):
    """Note how many sends there were by when."""
    while not end.wait(PERIOD_S):
        counts.append((time.time(), dist.sent))


def main(folder):
    """Serve."""
    comm = MPI.COMM_WORLD.Dup()
    stage = RingStage(*connect_pipeline(comm), COMPUTE_S, PAYLOAD)
    dist = Counting(comm)
    executor = PyExecutor(dist, stage, reentry_s=REENTRY_S, late=lambda: LATE_S)
    executor.start_worker()
    counts, end = [], threading.Event()
    counting = threading.Thread(target=count, args=(dist, counts, end))
    counting.start()
    number = 0
    while comm.rank == 0 and not (folder / "end").exists():
        executor.enqueue_requests([Request(number + i, [0], 8) for i in range(comm.size)])
        executor.await_responses(comm.size, LIMIT_S)
        number += comm.size
        (folder / "serves").touch()
    executor.shutdown()
    comm.Barrier()  # every relay has what it was sent: unpatched, nobody waits for the last send, and exit frees it
    end.set()
    counting.join()
    (folder / f"rank-{comm.rank}.json").write_text(json.dumps(counts))
    stage.close()


main(Path(sys.argv[1]))
