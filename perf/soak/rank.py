"""A process of lives, on each rank. Usage: rank.py FOLDER SEED SECONDS LIVES.

Lives until the seconds or the lives are over, and ends as the seed says. Writes FOLDER/rank-N.jsonl: before each life
its number, after it what was wrong and what the process has.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from dataclasses import asdict

from mpi4py import MPI
from outside import Line

from soak.life import Life
from soak.resources import look
from soak.situation import draw, leave_of
from trtllm_pp_progress.tools.host import connect_pipeline

LIMIT_S = 100.0  # for one life: only a hang reaches it
SETTLE_S = 2.0


def settled(before: int) -> None:
    """Wait for threads that are about to end: native ones are told to, and not waited for."""
    limit = time.monotonic() + SETTLE_S
    while look().threads > before and time.monotonic() < limit:
        time.sleep(0.001)


def lives(folder: str, seed: int, seconds: float, most: int) -> int:
    """Live, and return how many lives were wrong."""
    comm = MPI.COMM_WORLD
    line, pipes = Line(comm), connect_pipeline(comm)
    ends, number, bad = time.monotonic() + seconds, 0, 0
    threads = 0
    with open(os.path.join(folder, f"rank-{comm.rank}.jsonl"), "w", buffering=1) as record:
        while comm.bcast(number < most and time.monotonic() < ends):
            situation = draw(seed, number)
            record.write(json.dumps({"life": number, "situation": asdict(situation)}) + "\n")
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            wrong = Life(comm, line, pipes, situation).live()
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            settled(threads or look().threads)
            seen = look()
            threads = min(threads or seen.threads, seen.threads) if number > 2 else seen.threads
            record.write(json.dumps({"lived": number, "wrong": wrong, "has": seen}) + "\n")
            number, bad = number + 1, bad + bool(wrong)
    line.meet()
    return bad


def main() -> None:
    """Live, and leave."""
    folder, seed, seconds, most = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    output = os.open(os.path.join(folder, f"rank-{MPI.COMM_WORLD.rank}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    bad = lives(folder, seed, seconds, most)
    leave = leave_of(seed)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if leave == "finalize":
        MPI.Finalize()
    elif leave == "signal":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(bool(bad)))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LIMIT_S)
    elif leave == "exit":
        sys.exit(bool(bad))


main()
