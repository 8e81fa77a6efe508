"""At the end, one slot of every rank holds a handle that raises in test and in wait, another one never completes.

Usage: broken.py POLICY DEADLINE_S
"""

from common import arguments, begin, close, say, succeed
from mpi4py import MPI
from rings import executor_of, generate, settle

STEPS = 3
RAISING, NEVER, AFTER = 100, 101, 102


class Raising:
    """A request of a peer that is gone."""

    def test(self):
        """Raise as a failed request does."""
        raise MPI.Exception(MPI.ERR_OTHER)

    wait = test


class Never:
    """A request that nobody matches."""

    def test(self):
        """Answer as a pending pkl5 request does."""
        return (False, None)


class Done:
    """A request that is complete, in a slot after the broken ones."""

    def test(self):
        """Answer as a complete pkl5 request does."""
        return (True, None)

    def wait(self):
        """Return at once."""


def main():
    """Run one executor on every rank."""
    policy, deadline = arguments()
    comm, line = begin()
    with executor_of(comm, policy, reentry_s=0.005, settings={"drain_deadline_s": float(deadline)}) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
        settle(executor, line, STEPS)
        executor.send_handles[RAISING] = Raising()
        if policy != "regressed":
            executor.send_schedule_handles[NEVER] = Never()
        executor.send_handles[AFTER] = Done()
        line.meet()
        seconds = close(executor)
        left = [slot for slot in (RAISING, NEVER, AFTER) if executor.send_handles[slot] is not None]
        say("slots left:", *left or ["none"])
    succeed(executor, seconds)


main()
