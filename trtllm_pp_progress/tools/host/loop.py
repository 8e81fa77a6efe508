"""The executor thread, in era E's order: schedule, run a stage, hand the batch to the relay, handle what came back.

Source: NVIDIA/TensorRT-LLM#10349, #13267 and #12735.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.tools.host.dist import Dist, PPCommTag
from trtllm_pp_progress.tools.host.relay import Relay
from trtllm_pp_progress.tools.host.scheduler import Scheduler
from trtllm_pp_progress.tools.host.state import BatchStatePP, Request, SampleState, Stage

__all__ = ["PipelineLoop"]


class PipelineLoop(Relay):
    """Run batches until rank 0's scheduler stops; in between the thread is outside MPI, re-entering it now and then."""

    def __init__(
        self,
        dist: Dist,
        stage: Stage,
        scheduler: Scheduler,
        reentry_s: float | None,
        late: Callable[[], float] | None,
        after_forward: Callable[[], None] | None,
        schedule_payload: bytes,
    ) -> None:
        """Make what the loop keeps from one iteration to the next; see HostExecutor."""
        super().__init__(dist, late)
        self.stage, self.reentry_s, self.after_forward = stage, reentry_s, after_forward
        self._scheduler = scheduler  # of use on rank 0
        self._schedule_payload = schedule_payload
        self._last_of_queue = False
        self._relays = 0  # made by rank 0 since the last schedule, where the executor thread relays
        self._executed_batch_num = 0
        self.unhandled_batch_counter = 0
        self.active_requests: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.error: BaseException | None = None

        self.payload_bytes = 0  # of the last sample state received
        self.wrong = 0  # sample states and schedules received that are not what was sent
        self.steps = 0
        self.event_loop = self._executor_loop_pp

    def _event_loop_wrapper(self) -> None:
        try:
            self.event_loop()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._executor_loop_cleanup()

    def _executor_loop_pp(self) -> None:
        microbatch_id = 0
        while requests := self._pp_schedule_and_propagate(microbatch_id):
            self._before_forward(microbatch_id)
            host = self.stage.forward(requests)
            while not self.stage.taken(self.reentry_s):
                self.dist.touch()
            for request in requests:
                request.computed += 1 if request.computed else len(request.prompt)
            self.steps += 1
            self._propagate_executed_batch_num(microbatch_id)
            self.unhandled_batch_counter += 1
            self._relay(BatchStatePP(microbatch_id, SampleState(requests, host)))
            if self.after_forward is not None:
                self.after_forward()
            microbatch_id = (microbatch_id + 1) % self.num_micro_batches
        self._propagate_executed_batch_num(microbatch_id)
        while self.unhandled_batch_counter > 0:
            self._handle_executed_batch(self._next_executed_batch())

    def _pp_schedule_and_propagate(self, microbatch_id: int) -> list[Request]:
        """Agree with all ranks on the next batch; an empty one is the order to stop."""
        if self.dist.is_first_pp_rank:
            self._executed_batch_num = self._fetch_executed_batches()
            scheduled = self._scheduler.schedule(self._schedule_payload)
            scheduled.relays = self._relays
        else:
            self._await_activation()
            scheduled = self.dist.recv_object(self.dist.prev_pp_rank, PPCommTag.SCHEDULE_RESULT)
            self._relays = scheduled.relays
            self.wrong += scheduled.payload != self._schedule_payload
            for request in scheduled.new_requests:
                self.active_requests[request.request_id] = request
        self._last_of_queue = scheduled.last_of_queue
        self._send_on(self.send_schedule_handles, microbatch_id, scheduled, PPCommTag.SCHEDULE_RESULT)
        if not scheduled.request_ids:
            self.stage.forward([])  # wakes the next rank, which waits for an activation
        return [self.active_requests[request_id] for request_id in scheduled.request_ids]

    def _propagate_executed_batch_num(self, microbatch_id: int) -> None:
        """Tell all ranks how many executed batches rank 0 has handled, so that each handles as many."""
        if not self.dist.is_first_pp_rank:
            self._executed_batch_num = self.dist.recv_object(self.dist.prev_pp_rank, PPCommTag.EXECUTED_BATCH_NUM)
        self._send_on(
            self.send_expected_batch_num_handles, microbatch_id, self._executed_batch_num, PPCommTag.EXECUTED_BATCH_NUM
        )
        if not self.dist.is_first_pp_rank:
            for _ in range(self._executed_batch_num):
                self._handle_executed_batch(self._next_executed_batch())

    def _send_on(self, handles: list[Any], microbatch_id: int, value: Any, tag: PPCommTag) -> None:
        if self.dist.is_last_pp_rank:
            return
        self.wait_on_pp_send_handles(handles, microbatch_id)
        handles[microbatch_id] = self.dist.isend_object(value, self.dist.next_pp_rank, tag)

    def _fetch_executed_batches(self) -> int:
        """Rank 0: handle what has come back, wait where nothing else can be scheduled, return how many were handled."""
        scheduler, handled = self._scheduler, 0
        while True:
            scheduler.admit(self.active_requests)
            while not self.executed_batch_response_queue.empty() or (
                not scheduler.ready and self.unhandled_batch_counter
            ):
                self._handle_executed_batch(self._next_executed_batch())
                handled += 1
            if scheduler.ready or (scheduler.stopping and not self.active_requests):
                return handled

    def _handle_executed_batch(self, batch: BatchStatePP) -> None:
        self.unhandled_batch_counter -= 1
        host = batch.sample_state.host
        assert host is not None
        if not self.dist.is_last_pp_rank:
            self.wrong += self.stage.check(host)
            self.payload_bytes = len(host.payload)
        for request, token in zip(batch.sample_state.requests, host.new_tokens, strict=True):
            request.tokens.append(token)
            if request.finished:
                del self.active_requests[request.request_id]
                self.stage.release(request)
                self._respond(request)
            elif self.dist.is_first_pp_rank:
                self._scheduler.ready.append(request)

    def _respond(self, request: Request) -> None:
        if self.dist.is_first_pp_rank:
            with self.response_cv:
                self.finished.append(request)
                self.response_cv.notify_all()

    # Waits outside MPI

    def _await_activation(self) -> None:
        while not self.stage.receive(self.reentry_s):
            self.dist.touch()

    def _next_executed_batch(self) -> BatchStatePP:
        while True:
            try:
                return self.executed_batch_response_queue.get(timeout=self.reentry_s)
            except queue.Empty:
                self.dist.touch()

    # What eras that relay on the executor thread do here

    def _before_forward(self, microbatch_id: int) -> None:
        """Do nothing: only eras that relay on the executor thread drain here."""

    def _relay(self, batch: BatchStatePP) -> None:
        self.executed_batch_queue.put(batch)
