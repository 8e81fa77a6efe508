"""One rank of a ring that something happens to: it says who it is, how far it has come, and how its executor ended.

    ring.py FOLDER '{"relay": "C", "patched": true, "pp": 4, "payload": 1000000, "tokens": 20, "late_s": 0}'

Half of the tokens are generated, then the other half; then every rank waits until there is a file `end` in FOLDER,
which all hosts share, and shuts down. What it says is lines of JSON after MARK.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trtllm_pp_progress.installation.install import install, status
from trtllm_pp_progress.tools.job.world import world

MARK = "ring "
RELAYS = {"E": "regressed", "C": "flush"}  # eras, as the host executor's policies
COMPUTE_S, REENTRY_S = 0.01, 0.05
LATE_TIMES = 2
SETTINGS: dict[str, Any] = {"drain_deadline_s": 3.0, "stall_warning_s": 2.0}


def say(**words: Any) -> None:
    """Say something to whoever started the job: in one write, for ranks share the pipe."""
    sys.stdout.write(MARK + json.dumps(words) + "\n")
    sys.stdout.flush()


def run(comm: Any, folder: Path, relay: str, patched: bool, payload: int, tokens: int, late_s: float) -> None:
    """Live one life of an executor, and say what there is to say."""
    from trtllm_pp_progress.tools.bench.measure import clean_up_at_rest
    from trtllm_pp_progress.tools.host import POLICIES, Dist, Request, RingStage, connect_pipeline

    class Telling(RingStage):
        """A stage that says at once if a payload is not what was sent: the rank may not come to its end."""

        def check(self, host: Any) -> int:
            wrong = super().check(host)
            if wrong:
                say(wrong=wrong)
            return wrong

    rank, cls = comm.Get_rank(), POLICIES[RELAYS[relay]]
    # In the middle of the pipeline a receiver is busy elsewhere for the first messages.
    delays = itertools.chain([late_s] * LATE_TIMES, itertools.repeat(0.0))
    late = delays.__next__ if late_s and rank == comm.Get_size() // 2 else None
    say(rank=rank, pid=os.getpid())
    with install(cls, **SETTINGS) if patched else contextlib.nullcontext():
        stage = Telling(*connect_pipeline(comm), COMPUTE_S, payload)
        executor = cls(Dist(comm), stage, reentry_s=REENTRY_S, late=late)
        executor.start_worker()
        if relay == "C" and not patched:
            clean_up_at_rest(executor)  # its relay and its cleanup would meet in one request
        if rank == 0:
            for number, reached in enumerate(("half", "all")):
                executor.enqueue_requests([Request(number, [0], tokens // 2)])
                (done,) = executor.await_responses(1)
                first = number * (tokens // 2)
                if done.tokens != list(range(first, first + tokens // 2)):
                    say(wrong=1)
                say(reached=reached)
        while not (folder / "end").exists():
            time.sleep(0.01)
        began = time.monotonic()
        executor.shutdown()
        closed_s = time.monotonic() - began
        abandoned = sum(
            len(one["abandoned"]) for installed in status().get("installed", []) for one in installed["executors"]
        )
        say(
            rank=rank,
            closed_s=round(closed_s, 2),
            abandoned=abandoned,
            wrong=executor.wrong,
            error=repr(executor.error),
        )
        stage.close()


def main() -> None:
    """Run as one rank; SIGUSR1 shows its stacks."""
    faulthandler.register(signal.SIGUSR1)
    folder, words = Path(sys.argv[1]), json.loads(sys.argv[2])
    with world(words.pop("pp")) as comm:
        run(comm, folder, **words)


if __name__ == "__main__":
    main()
