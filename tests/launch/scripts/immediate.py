"""Executors that are shut down the moment their last token is there.

Usage: immediate.py POLICY TIMES
"""

from common import arguments, begin, close, say, succeed
from rings import executor_of, generate

STEPS = 3


def main():
    """Build, use and shut down one executor after the other."""
    policy, times = arguments()
    comm, _line = begin()
    slowest = 0.0
    for turn in range(int(times)):
        with executor_of(comm, policy, reentry_s=0.001, settings={"drain_deadline_s": 5}) as executor:
            if comm.rank == 0:
                assert generate(executor, STEPS, first_id=turn) == [list(range(STEPS))]
            slowest = max(slowest, close(executor))
        assert executor.wrong == 0
    say(f"{times} lifetimes")
    succeed(executor, slowest)


main()
