"""Doubles of the eras at their end, or on four ranks with a collective at the top of the loop.

Usage: eras.py gone patched|stock DEADLINE_S ERA[,ERA...]       ERA-async makes the thread relay
       eras.py collective patched|stock DEADLINE_S ERA
"""

import time

from common import arguments, begin, limited, say
from doubles import MPIDist
from doubles.world import PPCommTag, mpi_comm
from lives import double_of, generate
from rings import until

from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.tools.host import Sampled

STEPS = 4
SIZE = 1_000_000


class Leaver(MPIDist):
    """Rank 0 leaves early: the last sample state comes to it by other means, and it never receives it."""

    received = sent = 0
    last = None  # the request of the last sample state

    def isend_object(self, obj, dest, tag=0):
        """Send, and keep the request of the sample state that nobody will receive."""
        request = super().isend_object(obj, dest, tag)
        if tag == PPCommTag.SAMPLE_STATE:
            self.sent += 1
            self.last = request if self.sent == STEPS else None
        return request

    def recv_object(self, src, tag=0):
        """Receive, but for that one."""
        if tag == PPCommTag.SAMPLE_STATE and self.is_first_pp_rank:
            self.received += 1
            if self.received == STEPS:
                return Sampled([STEPS - 1], b"", STEPS - 1, time.monotonic()), [[STEPS - 1]]
        return super().recv_object(src, tag)


def gone(comm, line, era, patched, settings):
    """Shut down with the last sample state never received."""
    name, _, mode = era.partition("-")
    how = {"dist": Leaver, "payload_bytes": SIZE, "settings": settings, "is_async": mode == "async"}
    with double_of(comm, name, patched, **how) as executor:
        executor.start_worker()
        if comm.rank == 0:
            generate(executor, STEPS, 1)
        elif comm.rank == comm.size - 1:  # it is pending in its slot before anybody shuts down
            until(lambda: executor.dist.last and any(handle is executor.dist.last for handle in executor.send_handles))
        line.meet()
        started = time.monotonic()
        with limited():
            executor.shutdown()
        seconds, engine = time.monotonic() - started, engine_of(executor)
        say(f"era {era}: closed in {seconds:.2f} s, {len(engine.abandoned) if engine else 0} abandoned")
        line.meet()


def collective(comm, line, era, patched, settings):
    """Generate with a collective in every iteration, as the consensus of disaggregated serving is."""
    with double_of(comm, era, patched, payload_bytes=SIZE, settings=settings, is_async=False) as executor:
        executor.top_of_loop = lambda: mpi_comm().Barrier()
        with limited(early_s=float(comm.rank == comm.size - 1)):
            executor.start_worker()
            if comm.rank == 0:
                tokens = generate(executor, STEPS, comm.size)
                say("tokens:", sum(map(len, tokens)))
            executor.shutdown()
        engine = engine_of(executor)
        say("wrong:", executor.wrong, "abandoned:", len(engine.abandoned) if engine else 0)
        line.meet()


def main():
    """Run what is asked for."""
    what, how, deadline, eras = arguments()
    comm, line = begin()
    for era in eras.split(","):
        globals()[what](comm, line, era, how == "patched", {"drain_deadline_s": float(deadline)})
    say("leaves at", time.time())


main()
