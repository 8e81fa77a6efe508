"""The relay of each era in upstream's loop, by the name of a policy (`case.names`).

Source: NVIDIA/TensorRT-LLM#16170 (F), #18135 (G), #19643 (H); era I from its description, docs/eras.md.
"""

from __future__ import annotations

from typing import Any

from case.loop import Recorded, UpstreamLoop
from case.names import is_patched, unpatched
from case.native_peer import MpiProgressThread
from trtllm_pp_progress.tools.host import POLICIES, PPCommTag

__all__ = ["RELAYS", "needs_compiler", "relay_class"]

INTERVAL_US = 1000  # of era I's thread; upstream's default was not seen


class Oneshot(UpstreamLoop, POLICIES["oneshot"]):  # type: ignore[misc]
    """#14850's burst."""

    def progress_pp_send_handles(self, *arguments: Any, **named: Any) -> None:
        """Test one slot's send, at most 64 times; the time in it is recorded."""
        with self.dist.inside():
            super().progress_pp_send_handles(*arguments, **named)


class Flush(UpstreamLoop, POLICIES["flush"]):  # type: ignore[misc]
    """Era C."""


class AsyncH(UpstreamLoop, POLICIES["iprobe"]):  # type: ignore[misc]
    """Era H, the relay thread relays."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pp_async_broadcast_sample_state = True


class InlineF(UpstreamLoop):
    """Era F: the executor thread relays, over the main communicator, in as many slots as there are ranks."""

    MIN_ASYNC_MICRO_BATCH_NUM = 1

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pp_async_broadcast_sample_state = False

    def _executor_loop_pp(self) -> None:
        self._iterate(self._ring_broadcast_sample_state, must_get=True)

    def _before_forward(self, microbatch_id: int) -> None:
        for slot in range(self.num_micro_batches):
            self.wait_on_pp_send_handles(self.send_handles, slot)


class InlineG(InlineF):
    """Era G: the last rank drains only what rank 0 has had the time to receive."""

    def _drain_relay_sends_before_forward(self, microbatch_id: int) -> None:
        if self.dist.is_last_pp_rank:
            due = (microbatch_id + 1 - self.dist.pp_size) % self.num_micro_batches
            self.wait_on_pp_send_handles(self.send_handles, due)
        else:
            super()._before_forward(microbatch_id)

    def _before_forward(self, microbatch_id: int) -> None:
        self._drain_relay_sends_before_forward(microbatch_id)


class InlineH(InlineG, POLICIES["iprobe"]):  # type: ignore[misc]
    """Era H: the relay thread idles, and pumps."""


class WithThread(UpstreamLoop):
    """Era I's own: a native thread that probes at a fixed interval while the executor lives."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._mpi_progress_thread: MpiProgressThread | None = None

    def start_worker(self) -> None:
        """Start the native thread, then the others."""
        self._mpi_progress_thread = self._start_mpi_progress_thread()
        super().start_worker()

    def _start_mpi_progress_thread(self) -> MpiProgressThread:
        return MpiProgressThread(self.dist.comm, INTERVAL_US, PPCommTag.MPI_PROGRESS_PROBE)

    def _stop_relay(self) -> None:
        super()._stop_relay()
        if self._mpi_progress_thread is not None:
            self._mpi_progress_thread.stop()
            self.polls += self._mpi_progress_thread.num_probes


class AsyncI(WithThread, AsyncH):
    """Era I, the relay thread relays."""


class InlineI(WithThread, InlineH):
    """Era I, the executor thread relays."""


RELAYS: dict[str, type[UpstreamLoop]] = {  # one for each of case.names.RELAY_NAMES
    "regressed": UpstreamLoop,
    "flush": Flush,
    "oneshot": Oneshot,
    "iprobe": AsyncH,
    "native": AsyncI,
    "inline-f": InlineF,
    "inline-g": InlineG,
    "inline-h": InlineH,
    "inline-i": InlineI,
}


def needs_compiler(policy: str) -> bool:
    """Whether a policy has era I's native thread, which is compiled here."""
    return issubclass(RELAYS[unpatched(policy)], WithThread)


def relay_class(policy: str) -> type[UpstreamLoop]:
    """Return the executor of a policy; where it is not patched, its own waits are recorded as time inside MPI."""
    cls = RELAYS[unpatched(policy)]
    return cls if is_patched(policy) else type(cls.__name__, (Recorded, cls), {})
