"""The last COUNT sends to LEAVER, 1 MB each, meet a receiver that has left (`gone`) or takes them 2 s later (`late`).

Usage: last_send.py POLICY|exit-wait gone|late COUNT LEAVER DEADLINE_S
"""

import time

from common import Forgetful, arguments, await_send, begin, close, say, succeed
from rings import executor_of, generate

from trtllm_pp_progress.tools.host import Dist, HostExecutor, PPCommTag, Sampled

STEPS = 4
SIZE = 1_000_000


class ExitWait(HostExecutor):
    """The relay, not the cleanup, waits for its sends, at its exit: the third cause in NVIDIA/TensorRT-LLM#13267."""

    def _broadcast_sample_state_loop(self):
        super()._broadcast_sample_state_loop()
        for slot in range(self.num_micro_batches):
            super().wait_on_pp_send_handles(self.send_handles, slot)

    def wait_on_pp_send_handles(self, send_handles, microbatch_id):
        """Wait for what the relay does not wait for itself."""
        if send_handles is not self.send_handles:
            super().wait_on_pp_send_handles(send_handles, microbatch_id)


def sent(executor, step, posted):
    """Return what the last rank sent in a step."""
    payloads = executor.stage._payloads
    return Sampled([step], payloads[step % len(payloads)], step, posted)


def main():
    """Run one executor on every rank."""
    policy, receiver, count, leaver, deadline = arguments()
    comm, line = begin()
    leaves, first = comm.rank == int(leaver), STEPS - int(count)
    dist = Forgetful(comm, first) if leaves else Dist(comm)
    settings = {"drain_deadline_s": float(deadline)}
    variant = ExitWait if policy == "exit-wait" else None
    with executor_of(
        comm, policy, payload_bytes=SIZE, reentry_s=0.005, dist=dist, settings=settings, variant=variant
    ) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
        if policy.startswith("patched") and comm.rank == (int(leaver) - 1) % comm.size:
            await_send(executor, STEPS - 1)  # or the cleanup may miss it, and it is let go: see let_go.py
        line.meet()  # the deadline of a shutdown is for the shutdown alone
        seconds = close(executor)
        if leaves and receiver == "late":
            time.sleep(2)
            for step in range(first, STEPS):
                host, _ = dist.relay_comm.recv(source=dist.prev_pp_rank, tag=PPCommTag.SAMPLE_STATE)
                say(f"took {step} late:", "right" if host == sent(executor, step, host.posted) else "WRONG")
    succeed(executor, seconds)


main()
