"""The relay of each era, as a difference from HostExecutor; honest ones to measure against.

`POLICIES` names them as the bench does. Each costs what upstream's costs: no more, no less.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.tools.host.dist import PPCommTag
from trtllm_pp_progress.tools.host.executor import HostExecutor
from trtllm_pp_progress.tools.host.state import BatchStatePP

__all__ = ["POLICIES", "FlushExecutor", "InlineExecutor", "IprobeExecutor", "OneshotExecutor"]


class FlushExecutor(HostExecutor):
    """Era C (#12528): with nothing left to relay, block until the send is complete. Fast, and the one that hangs."""

    def _broadcast_sample_state_loop(self) -> None:
        self.dist.set_thread_local_comm(self._broadcast_mpi_comm)
        while (batch := self.executed_batch_queue.get()) is not None:
            self._ring_broadcast_sample_state(batch)
            if self.executed_batch_queue.empty():
                self.wait_on_pp_send_handles(self.send_handles, batch.microbatch_id)

    # One class has the whole relay, as upstream's does.
    _ring_broadcast_sample_state = HostExecutor._ring_broadcast_sample_state
    wait_on_pp_send_handles = HostExecutor.wait_on_pp_send_handles
    _executor_loop_cleanup = HostExecutor._executor_loop_cleanup


class OneshotExecutor(HostExecutor):
    """#14850 as proposed: with nothing left to relay, one burst of at most 64 tests."""

    polls = 0

    def _broadcast_sample_state_loop(self) -> None:
        self.dist.set_thread_local_comm(self._broadcast_mpi_comm)
        while (batch := self.executed_batch_queue.get()) is not None:
            self._ring_broadcast_sample_state(batch)
            if self.executed_batch_queue.empty():
                self.progress_pp_send_handles(self.send_handles, batch.microbatch_id)

    def progress_pp_send_handles(self, send_handles: list[Any], microbatch_id: int, max_polls: int = 64) -> None:
        """Test one slot's send until it is complete, at most `max_polls` times."""
        handle = send_handles[microbatch_id]
        if handle is None:
            return
        for _ in range(max_polls):
            self.polls += 1
            if handle.test()[0]:
                send_handles[microbatch_id] = None
                return


def get_with_mpi_progress(
    batches: queue.Queue[BatchStatePP | None], pump: Callable[[], object], period_s: float, stop: threading.Event
) -> BatchStatePP | None:
    """Return the next batch, and call `pump` every `period_s` seconds until there is one, or until `stop` is set."""
    while True:
        try:
            return batches.get(timeout=period_s)
        except queue.Empty:
            if not stop.is_set():
                pump()


class IprobeExecutor(HostExecutor):
    """Era H with the thread relay (#19643): while idle, an Iprobe for a tag nobody sends, every 5 ms."""

    POLL_S = 0.005

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.polls = 0
        self._pp_mpi_progress = self._pump
        self._pp_mpi_progress_stop = threading.Event()

    def _pump(self) -> None:
        self.polls += 1
        self.dist.touch()

    def _broadcast_sample_state_loop(self) -> None:
        self.dist.set_thread_local_comm(self._broadcast_mpi_comm)
        pump, stop = self._pp_mpi_progress, self._pp_mpi_progress_stop
        while (batch := get_with_mpi_progress(self.executed_batch_queue, pump, self.POLL_S, stop)) is not None:
            self._ring_broadcast_sample_state(batch)

    def _stop_relay(self) -> None:
        self._pp_mpi_progress_stop.set()
        super()._stop_relay()

    # One class has the whole relay, as upstream's does.
    _ring_broadcast_sample_state = HostExecutor._ring_broadcast_sample_state
    wait_on_pp_send_handles = HostExecutor.wait_on_pp_send_handles
    _executor_loop_cleanup = HostExecutor._executor_loop_cleanup


class InlineExecutor(HostExecutor):
    """Era G by default (#16170, #18135): the executor thread relays, and drains before a forward; the thread idles.

    A rank receives the schedule first, inside MPI, and waits for the activation afterwards, as upstream does: what is
    parked is parked during a forward or while waiting for the activation.
    """

    MIN_ASYNC_MICRO_BATCH_NUM = 1  # as many slots as ranks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._to_relay: deque[BatchStatePP] = deque()

    def _await_activation(self) -> None:
        self.dist.await_message(self.dist.prev_pp_rank, PPCommTag.SCHEDULE_RESULT)

    def _fetch_executed_batches(self) -> int:
        self._relays = 0
        return super()._fetch_executed_batches()

    def _before_forward(self, microbatch_id: int) -> None:
        if self.dist.is_last_pp_rank:  # it sends at once
            due = (microbatch_id + 1 - self.dist.pp_size) % self.num_micro_batches
            self.wait_on_pp_send_handles(self.send_handles, due)
        else:
            if not self.dist.is_first_pp_rank:  # relay before the drain, or each rank would wait for the next one
                for _ in range(self._relays):
                    self._ring_broadcast_sample_state(self._to_relay.popleft())
            for slot in range(self.num_micro_batches):
                self.wait_on_pp_send_handles(self.send_handles, slot)
        super()._await_activation()

    def _relay(self, batch: BatchStatePP) -> None:
        self._to_relay.append(batch)
        # The last rank sends at once. The others receive only when nothing else can run, or the pipeline is full.
        if self.dist.is_last_pp_rank or self._last_of_queue or len(self._to_relay) >= self.dist.pp_size:
            self._ring_broadcast_sample_state(self._to_relay.popleft())

    def _next_executed_batch(self) -> BatchStatePP:
        if self.executed_batch_response_queue.empty():
            self._relays += 1
            self._ring_broadcast_sample_state(self._to_relay.popleft())
        return self.executed_batch_response_queue.get()


POLICIES: dict[str, type[HostExecutor]] = {
    "regressed": HostExecutor,
    "flush": FlushExecutor,
    "oneshot": OneshotExecutor,
    "inline": InlineExecutor,
    "iprobe": IprobeExecutor,
}
