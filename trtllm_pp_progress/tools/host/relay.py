"""The relay of era E, and the end of an executor: one class has the whole relay, as upstream's does.

Source: NVIDIA/TensorRT-LLM#10349, #13267 and #12735.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.tools.host.dist import Dist, PPCommTag
from trtllm_pp_progress.tools.host.state import BatchStatePP, Sampled, Transfer

__all__ = ["Relay"]


class Relay:
    """Pass sample states on from rank to rank; a send is left alone until its slot is used again."""

    MIN_ASYNC_MICRO_BATCH_NUM = 1024

    def __init__(self, dist: Dist, late: Callable[[], float] | None) -> None:
        """Make the tables. `late` is how long a receiver is busy elsewhere once a sample state was announced."""
        self.dist, self.late = dist, late
        self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        self.send_handles: list[Any] = [None] * self.num_micro_batches
        self.send_schedule_handles: list[Any] = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles: list[Any] = [None] * self.num_micro_batches
        self._broadcast_mpi_comm: Any = None
        self.executed_batch_queue: queue.Queue[BatchStatePP | None]
        self.executed_batch_response_queue: queue.Queue[BatchStatePP]

        self.response_cv = threading.Condition()
        self.is_shutdown = False
        self.shutdown_event = threading.Event()
        self.transfers: list[Transfer] = []  # by sample state received

    def _broadcast_sample_state_loop(self) -> None:
        self.dist.set_thread_local_comm(self._broadcast_mpi_comm)
        while (batch := self.executed_batch_queue.get()) is not None:
            self._ring_broadcast_sample_state(batch)

    def _ring_broadcast_sample_state(self, batch: BatchStatePP) -> None:
        dist, sample_state = self.dist, batch.sample_state
        if not dist.is_last_pp_rank:
            if self.late is not None:
                dist.await_message(dist.prev_pp_rank, PPCommTag.SAMPLE_STATE)
                time.sleep(self.late())
            ready = time.monotonic()
            sample_state.host, _diffs = dist.recv_object(dist.prev_pp_rank, PPCommTag.SAMPLE_STATE)
            self.transfers.append(Transfer(sample_state.host.posted, ready, time.monotonic()))
        self.executed_batch_response_queue.put(batch)
        if not dist.is_second_last_pp_rank:
            self.wait_on_pp_send_handles(self.send_handles, batch.microbatch_id)
            host = sample_state.host
            assert host is not None
            onward = Sampled(host.new_tokens, host.payload, host.step, time.monotonic())
            self.send_handles[batch.microbatch_id] = dist.isend_object(
                (onward, []), dist.next_pp_rank, PPCommTag.SAMPLE_STATE
            )

    def wait_on_pp_send_handles(self, send_handles: list[Any], microbatch_id: int) -> None:
        """Block until a slot's send is complete, then clear the slot."""
        if send_handles[microbatch_id] is not None:
            send_handles[microbatch_id].wait()
            send_handles[microbatch_id] = None

    def _executor_loop_cleanup(self) -> None:
        with self.response_cv:
            self.is_shutdown = True
            self.response_cv.notify_all()
        self.shutdown_event.set()
        for slot in range(self.num_micro_batches):
            self.wait_on_pp_send_handles(self.send_handles, slot)
            self.wait_on_pp_send_handles(self.send_schedule_handles, slot)
            self.wait_on_pp_send_handles(self.send_expected_batch_num_handles, slot)
