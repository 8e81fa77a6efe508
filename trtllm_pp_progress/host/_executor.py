"""A small executor of PyExecutor's shape: the pipeline loop, the relay thread, upstream's order of calls at the end.

It knows nothing of our patch and is patched like the real class. What it models of upstream and what it leaves out:

- Two threads per rank. The executor thread schedules, runs its stage and handles executed batches; the relay thread
  passes the sample state on, rank P-1 -> 0 -> 1 -> ... -> P-2, over a communicator of its own.
- An iteration makes upstream's MPI calls: schedule and executed-batch number, received and sent on as pickled isends.
- In between the executor thread is outside MPI: it computes, and it waits for an activation (upstream: NCCL receive and
  CUDA synchronisation) or for the response queue. What else would bring it into MPI meanwhile is one number, the
  re-entry period: it bounds how long a parked send waits. It is an input, and measured (`Dist.entries`).
- Not modelled: tensor parallelism, disaggregation, KV-cache limits, speculation, empty iterations.

Source of the order of calls: NVIDIA/TensorRT-LLM#10349, #13267 and #12735 (era E).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from trtllm_pp_progress.host._dist import Dist, PPCommTag
from trtllm_pp_progress.host._scheduler import Scheduler
from trtllm_pp_progress.host._state import BatchStatePP, Host, Request, SampleState, Stage

__all__ = ["HostExecutor"]


class HostExecutor:
    """Era E: a relayed send is left alone until its slot is used again.

    Construct it on every rank, on the main thread (the communicator's duplicate is collective), then start_worker();
    rank 0 enqueues requests and awaits responses; shutdown() on every rank.
    """

    MIN_ASYNC_MICRO_BATCH_NUM = 1024

    def __init__(
        self,
        dist: Dist,
        stage: Stage,
        *,
        reentry_s: float | None = None,
        max_batch_size: int = 1,
        late: Callable[[], float] | None = None,
        after_forward: Callable[[], None] | None = None,
        schedule_payload: bytes = b"",
    ) -> None:
        """Make the executor of one rank.

        `reentry_s` is the re-entry period (None: never); `late` is how long, in seconds, a receiver is busy elsewhere
        once a sample state was announced; `after_forward` runs on the executor thread after each batch it relays;
        `schedule_payload` travels with every schedule.
        """
        self.dist, self.stage = dist, stage
        self.reentry_s = reentry_s
        self.late, self.after_forward = late, after_forward
        self._schedule_payload = schedule_payload

        self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        self.send_handles: list[Any] = [None] * self.num_micro_batches
        self.send_schedule_handles: list[Any] = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles: list[Any] = [None] * self.num_micro_batches
        self.unhandled_batch_counter = 0
        self._broadcast_mpi_comm: Any = None

        self.active_requests: dict[int, Request] = {}
        self._scheduler = Scheduler(max_batch_size)  # of use on rank 0
        self._last_of_queue = False
        self._relays = 0  # made by rank 0 since the last schedule, where the executor thread relays
        self._executed_batch_num = 0
        self.response_cv = threading.Condition()
        self.finished: list[Request] = []
        self.is_shutdown = False
        self.shutdown_event = threading.Event()
        self.error: BaseException | None = None

        self.parked_s: list[float] = []  # by sample state received: from both sides posted to complete
        self.payload_bytes = 0  # of the last sample state received
        self.wrong = 0  # sample states and schedules received that are not what was sent
        self.steps = 0

        self.worker_started = False
        self.event_loop = self._executor_loop_pp

    # The callers' side

    def start_worker(self) -> None:
        """Start the relay thread, then the executor thread; collective over the pipeline."""
        self.executed_batch_queue: queue.Queue[BatchStatePP | None] = queue.Queue(maxsize=self.num_micro_batches)
        self.executed_batch_response_queue: queue.Queue[BatchStatePP] = queue.Queue(maxsize=-1)
        self._broadcast_mpi_comm = self.dist.comm.Dup()
        self.broadcast_sample_state_handler = threading.Thread(
            target=self._broadcast_sample_state_loop, daemon=True, name="broadcast_sample_state_handler"
        )
        self.broadcast_sample_state_handler.start()
        self.worker_thread = threading.Thread(target=self._event_loop_wrapper, daemon=True, name="executor")
        self.worker_thread.start()
        self.worker_started = True

    def enqueue_requests(self, requests: Iterable[Request]) -> None:
        """Hand requests to rank 0's executor thread."""
        for request in requests:
            self._scheduler.requests.put(request)

    def await_responses(self, count: int, timeout: float | None = None) -> list[Request]:
        """Return `count` finished requests of rank 0, in order of completion; TimeoutError, or what ended the loop."""
        with self.response_cv:
            arrived = self.response_cv.wait_for(lambda: len(self.finished) >= count or self.is_shutdown, timeout)
            self.raise_error()
            if not arrived:
                raise TimeoutError(f"{len(self.finished)} of {count} responses after {timeout} s")
            taken, self.finished = self.finished[:count], self.finished[count:]
            return taken

    def shutdown(self) -> None:
        """End both threads, in upstream's order; no join has a timeout, as upstream's have none."""
        if self.dist.is_first_pp_rank:
            self._scheduler.requests.put(None)
        self.shutdown_event.wait()
        self.worker_thread.join()
        self.executed_batch_queue.put(None)
        self.broadcast_sample_state_handler.join()
        self.worker_started = False

    def raise_error(self) -> None:
        """Raise RuntimeError from what ended the loop too early, if anything: messages may have been left behind."""
        if self.error is not None:
            raise RuntimeError(f"the executor loop of rank {self.dist.pp_rank} failed") from self.error

    # The executor thread

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

    # The relay

    def _before_forward(self, microbatch_id: int) -> None:
        """Do nothing: only eras that relay on the executor thread drain here."""

    def _relay(self, batch: BatchStatePP) -> None:
        self.executed_batch_queue.put(batch)

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
            self.parked_s.append(time.monotonic() - max(ready, sample_state.host.posted))
        self.executed_batch_response_queue.put(batch)
        if not dist.is_second_last_pp_rank:
            self.wait_on_pp_send_handles(self.send_handles, batch.microbatch_id)
            host = sample_state.host
            assert host is not None
            onward = Host(host.new_tokens, host.payload, host.step, time.monotonic())
            self.send_handles[batch.microbatch_id] = dist.isend_object(
                (onward, []), dist.next_pp_rank, PPCommTag.SAMPLE_STATE
            )

    def wait_on_pp_send_handles(self, send_handles: list[Any], microbatch_id: int) -> None:
        """Block until a slot's send is complete, then clear the slot."""
        if send_handles[microbatch_id] is not None:
            send_handles[microbatch_id].wait()
            send_handles[microbatch_id] = None

    # The end

    def _executor_loop_cleanup(self) -> None:
        with self.response_cv:
            self.is_shutdown = True
            self.response_cv.notify_all()
        self.shutdown_event.set()
        for slot in range(self.num_micro_batches):
            self.wait_on_pp_send_handles(self.send_handles, slot)
            self.wait_on_pp_send_handles(self.send_schedule_handles, slot)
            self.wait_on_pp_send_handles(self.send_expected_batch_num_handles, slot)
