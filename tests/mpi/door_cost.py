"""What an open door that is asked once a second costs the ring: era C's double, patched, published, in pairs.

    PYTHONPATH=tests/support:perf ci/mpi.sh 4 600 tests/mpi/door_cost.py [--repeat 15] [--floor 0.995]

One line: tokens a second with no door and with every rank's door open and watched, the ratio of their medians and the
median of the pairs' ratios. Exits with 1 if that is below the floor. Run it on a machine that does nothing else.
"""

import argparse
import statistics
import subprocess
import sys
from contextlib import contextmanager

from mpi4py import MPI
from outside import Line
from own_ground import run

from trtllm_pp_progress.door.server import DOOR
from trtllm_pp_progress.installation.install import status

WATCH = """
import time
from trtllm_pp_progress.door.client import ask
from trtllm_pp_progress.door.place import doors
while True:
    began = time.monotonic()
    for path in doors().values():
        ask(path)
    time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
"""


@contextmanager
def watched(comm):
    """Open this rank's door, and have somebody ask at every door once a second."""
    DOOR.add("tensorrt_llm", lambda request: status())
    comm.Barrier()
    watcher = subprocess.Popen([sys.executable, "-c", WATCH]) if comm.rank == 0 else None
    try:
        yield
    finally:
        if watcher is not None:
            watcher.kill()
            watcher.wait()
        DOOR.close()


def main():
    """Measure, print a line on rank 0, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--floor", type=float, default=0.995)
    asked = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    line, pairs = Line(comm), []
    for number in range(asked.repeat):
        rates = {}
        for is_open in ((False, True), (True, False))[number % 2]:
            if is_open:
                with watched(comm):
                    rates[is_open] = run(comm, line, "published", "C", None, True)
            else:
                rates[is_open] = run(comm, line, "published", "C", None, True)
        pairs.append((rates[False], rates[True]))
    below = False
    if comm.rank == 0:
        shut, opened = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        each = statistics.median(b / a for a, b in pairs)
        below = each < asked.floor
        text = f"no door {shut:.2f} tokens/s, open and watched {opened:.2f}"
        print(f"{text}, ratio {opened / shut:.3f}, pairs {each:.3f} of {asked.repeat}")
    line.meet()
    return int(below)


if __name__ == "__main__":
    sys.exit(main())
