"""Each era's double beside itself unpatched: whether the patch costs anything on a release's own ground.

    PYTHONPATH=tests/support:perf ci/mpi.sh 4 1200 tests/mpi/own_ground.py [--rows F-inline,I-async]
        [--scenarios published,steady,large,late,many] [--repeat 5] [--floor 0.99]

One line an era, mode and scenario: tokens a second unpatched and patched, the ratio of their medians and the median of
the ratios of pairs that ran one after the other; `flush` is era C's blocking flush in the same run. Exits with 1 if a
ratio of medians is below the floor. Era I's thread needs no GIL here, as upstream's, so a C compiler has to be there.
Run it on a machine that does nothing else.
"""

import argparse
import statistics
import sys
import time
from unittest import mock

import lives
from doubles import INLINE, MPIDist, eras
from doubles.world import PPCommTag, mpi_comm
from lives import double_of, generate, settle
from mpi4py import MPI
from outside import Line

from case.native_peer import MpiProgressThread

LATE_S = 0.02
SCENARIOS = {  # seconds a stage, payload bytes, seconds a receiver is late, requests at once, steps
    "published": (0.0007, 65536, 0.0, 1, 400),
    "steady": (0.002, 65536, 0.0, 1, 150),
    "large": (0.002, 1_000_000, 0.0, 1, 120),
    "late": (0.002, 65536, LATE_S, 1, 40),
    "many": (0.002, 65536, 0.0, 8, 60),
}


def late_by(seconds):
    """Return a communicator whose sample states are received so much late."""

    class Late(MPIDist):
        def recv_object(self, src, tag=0):
            if tag == PPCommTag.SAMPLE_STATE:
                mpi_comm().Probe(source=src, tag=tag)
                time.sleep(seconds)
            return super().recv_object(src, tag)

    return Late if seconds else MPIDist


def native_thread(comm, interval_us, tag):
    """Return era I's thread for a communicator by its Fortran handle, as upstream makes it."""
    return MpiProgressThread(MPI.Comm.f2py(comm), interval_us, tag)


def run(comm, line, scenario, era, is_async, patched):
    """Run once, and return tokens a second on rank 0."""
    compute_s, payload, late_s, requests, steps = SCENARIOS[scenario]
    with mock.patch.object(lives, "COMPUTE_S", compute_s), mock.patch.object(eras, "MpiProgressThread", native_thread):
        life = double_of(comm, era, patched, dist=late_by(late_s), is_async=is_async, payload_bytes=payload)
        with life as executor:
            executor.start_worker()
            line.meet()
            started = time.monotonic()
            if comm.rank == 0:
                generate(executor, steps, requests)
            rate = steps * requests / (time.monotonic() - started)
            if era == "C":
                settle(executor, line, steps * requests)
            executor.shutdown()
    assert executor.wrong == 0
    return rate


def main():
    """Measure, print a line a row on rank 0, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=",".join(f"{era}-{mode}" for era in INLINE for mode in ("inline", "async")))
    parser.add_argument("--scenarios", default="published,steady,large,late,many")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--floor", type=float, default=0.99)
    asked = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    line, below = Line(comm), []
    for scenario in asked.scenarios.split(","):
        rows = [(row.partition("-")[0], row.endswith("-async")) for row in asked.rows.split(",")]
        seen = {row: [] for row in rows}
        flush = []
        for _ in range(asked.repeat):  # all rows in turn: they meet the same machine
            flush.append(run(comm, line, scenario, "C", None, False))
            for row in rows:
                seen[row].append([run(comm, line, scenario, *row, patched) for patched in (False, True)])
        if comm.rank == 0:
            reference = statistics.median(flush)
            print(f"{scenario}: flush {reference:.2f} tokens/s", flush=True)
            for (era, is_async), pairs in seen.items():
                stock, ours = (statistics.median(rates) for rates in zip(*pairs, strict=True))
                each = statistics.median(b / a for a, b in pairs)
                name = f"{era} {'async' if is_async else 'inline'}"
                text = (
                    f"  {name:10} unpatched {stock:8.2f} patched {ours:8.2f} ratio {ours / stock:.3f} pairs {each:.3f}"
                )
                print(f"{text}  of flush {ours / reference:.3f}", flush=True)
                below += [name] if ours / stock < asked.floor else []
    line.meet()
    return int(bool(below))


if __name__ == "__main__":
    sys.exit(main())
