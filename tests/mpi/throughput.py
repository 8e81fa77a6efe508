"""Throughput of each era's double, patched, against era C's blocking flush as it is, with receivers that are late.

    PYTHONPATH=tests/support ci/mpi.sh 4 1200 tests/mpi/throughput.py [--repeat 5] [--steps 60] [--eras C,E2]

One line an era: tokens a second and the ratio to the flush; medians of runs that alternate. Exits with 1 if a ratio is
below the floor. Run it on a machine that does nothing else.
"""

import argparse
import statistics
import sys
import time

from doubles import INLINE, PATCHED, MPIDist
from doubles.world import PPCommTag, mpi_comm
from lives import double_of, generate, settle
from mpi4py import MPI
from outside import Line

LATE_S = 0.02
MODES = [(era, None) for era in PATCHED] + [(era, True) for era in INLINE]


class Late(MPIDist):
    """A receiver that is busy elsewhere for 20 ms once a sample state was announced."""

    def recv_object(self, src, tag=0):
        """Receive, sample states late."""
        if tag == PPCommTag.SAMPLE_STATE:
            mpi_comm().Probe(source=src, tag=tag)
            time.sleep(LATE_S)
        return super().recv_object(src, tag)


def run(comm, line, era, is_async, patched, steps):
    """Run once, and return tokens a second on rank 0."""
    with double_of(comm, era, patched, dist=Late, is_async=is_async) as executor:
        executor.start_worker()
        started = time.monotonic()
        if comm.rank == 0:
            generate(executor, steps, 1)
        rate = steps / (time.monotonic() - started)
        if era == "C" and not patched:
            settle(executor, line, steps)
        executor.shutdown()
    assert executor.wrong == 0
    return rate


def main():
    """Measure every era, print a table on rank 0, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--floor", type=float, default=0.98)
    parser.add_argument("--eras", default=",".join(PATCHED), help="of these only")
    asked = parser.parse_args()
    if unknown := set(asked.eras.split(",")) - set(PATCHED):
        parser.error(f"--eras: no {', '.join(sorted(unknown))} in {','.join(PATCHED)}")
    comm = MPI.COMM_WORLD.Dup()
    line, below = Line(comm), []
    for era, is_async in [mode for mode in MODES if mode[0] in asked.eras.split(",")]:
        pairs = [
            (run(comm, line, "C", None, False, asked.steps), run(comm, line, era, is_async, True, asked.steps))
            for _ in range(asked.repeat)
        ]
        ratio = statistics.median(ours / flush for flush, ours in pairs)
        if comm.rank == 0:
            name = f"{era}{' async' if is_async else ''}"
            print(f"{name:10} {statistics.median(ours for _, ours in pairs):8.2f} tok/s {ratio:7.3f}", flush=True)
            below += [name] if ratio < asked.floor else []
    line.meet()
    return int(bool(below))


if __name__ == "__main__":
    sys.exit(main())
