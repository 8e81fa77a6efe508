"""The last sample state, 1 MB, goes out once the cleanup is over; its receiver takes it 2 s after the shutdown.

Usage: let_go.py POLICY
"""

import threading
import time

from common import Forgetful, arguments, begin, close, limited, say, succeed
from outside import LIMIT_S
from rings import executor_of, generate

from trtllm_pp_progress.tools.host import Dist, PPCommTag

STEPS = 4
SIZE = 1_000_000


class Held(Dist):
    """A sender whose last sample state has to wait until it may go."""

    def __init__(self, comm):
        super().__init__(comm)
        self._sent, self.may = 0, threading.Event()

    def isend_object(self, data, dest, tag):
        """Send, that one late."""
        if tag == PPCommTag.SAMPLE_STATE:
            self._sent += 1
            assert self._sent < STEPS or self.may.wait(LIMIT_S)
        return super().isend_object(data, dest, tag)


def main():
    """Run one executor on each of two ranks, and stay outside MPI until the receiver has what was sent."""
    (policy,) = arguments()
    comm, line = begin()
    dist = Forgetful(comm, STEPS - 1) if comm.rank == 0 else Held(comm)
    settings = {"drain_deadline_s": 30.0}
    with executor_of(comm, policy, payload_bytes=SIZE, reentry_s=0.005, dist=dist, settings=settings) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
        else:  # a relay that is slow: the executor thread's cleanup is over when it sends
            thread = executor.worker_thread
            threading.Thread(target=lambda: (thread.join(), dist.may.set()), daemon=True).start()
        line.meet()
        seconds = close(executor)
        succeed(executor, seconds)
        if comm.rank == 0:
            time.sleep(2)
            with limited():
                host, _ = dist.relay_comm.recv(source=1, tag=PPCommTag.SAMPLE_STATE)
            payload = executor.stage._payloads[(STEPS - 1) % len(executor.stage._payloads)]
            say("took it late:", "right" if (host.step, host.payload) == (STEPS - 1, payload) else "WRONG")
        line.meet()


main()
