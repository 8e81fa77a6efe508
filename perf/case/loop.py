"""PyExecutor's iteration: what decides how long a parked send waits, without a number put in.

The host executor's own loop takes the re-entry period as an input. This one has none. It makes upstream's iterations,
the empty ones included, in upstream's order:

- The schedule comes first, received inside MPI. The forward is launched and not waited for.
- The last rank hands a batch to the relay one iteration later, once the token is on the host, which it waits for in
  CUDA's event synchronisation. The others hand it over P - 1 iterations later, and only then does their relay enter MPI
  to receive. With one request in flight the iterations in between are empty.
- Rank 0 waits for the relay thread where nothing can be scheduled; then it says how many batches it has handled. The
  others wait for that number inside MPI, and for as many batches outside it, before they launch the next forward.
- Where the executor thread relays itself, it does so at that place, and before a forward it waits for earlier sends.

So a relayed send rests from its post until the executor thread of its rank has launched the next forward and come
round again: for the host's part of a step, twice a token. `host_work_s` is that part where it is not ours to run:
PyExecutor's Python for scheduling, resources and inputs of a step that has a batch. Read in NVIDIA/TensorRT-LLM#10349,
#13267 and #16170. `case.relays` has the relay of each era in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from case.record import RecordedDist
from trtllm_pp_progress.tools.host import BatchStatePP, HostExecutor, PPCommTag, Request, SampleState

__all__ = ["Recorded", "UpstreamLoop", "record_drives"]


class UpstreamLoop(HostExecutor):
    """HostExecutor with upstream's iterations; its stage also has launch() and sampled(), see `case.stage`.

    Set `host_work_s` and `hold_gil` before start_worker(). A thread that fails ends the process group through
    threading.excepthook, which `case.measure` sets.
    """

    dist: RecordedDist
    host_work_s = 0.0
    hold_gil = False

    def enqueue_requests(self, requests: Iterable[Request]) -> None:
        """Hand requests to rank 0's executor thread, all at once: which batch they form must not be a race."""
        waiting = self._scheduler.requests
        with waiting.mutex:
            waiting.queue.extend(requests)
            waiting.not_empty.notify()

    def _executor_loop_pp(self) -> None:
        self._iterate(self.executed_batch_queue.put)

    def _iterate(self, relay: Callable[[BatchStatePP], object], must_get: bool = False) -> None:
        """Run iterations until the order to stop; `must_get`: rank 0 takes what has come back in each of them."""
        dist, slots = self.dist, self.num_micro_batches
        executed: list[BatchStatePP | None] = [None] * slots
        lag = 1 if dist.is_last_pp_rank else dist.pp_size - 1
        slot = 0
        while (requests := self._schedule(slot)) is not None:
            if requests:
                begun = time.monotonic()
                self._before_forward(slot)
                _work(self.host_work_s, self.hold_gil)
                self.stage.launch(requests)  # type: ignore[attr-defined]
                dist.notes.host[self.steps] = (begun, time.monotonic())
                for request in requests:
                    request.computed += 1 if request.computed else len(request.prompt)
                self.steps += 1
                executed[slot] = BatchStatePP(slot, SampleState(requests))
                if self.after_forward is not None:
                    self.after_forward()
            due = (slot - lag) % slots
            if (batch := executed[due]) is not None:
                executed[due] = None
                if dist.is_last_pp_rank:
                    batch.sample_state.host = self.stage.sampled()  # type: ignore[attr-defined]
                self.unhandled_batch_counter += 1
                relay(batch)
            self._handle(slot, must_get or not requests)
            slot = (slot + 1) % slots
        while self.unhandled_batch_counter > 0:
            self._handle_executed_batch(self._next_executed_batch())

    def _schedule(self, slot: int) -> list[Request] | None:
        """Agree on the next batch, which may be empty; None is the order to stop."""
        scheduler = self._scheduler
        if self.dist.is_first_pp_rank:
            scheduler.admit(self.active_requests)
            scheduled = None if scheduler.stopping and not self.active_requests else scheduler.schedule()
        else:
            scheduled = self.dist.recv_object(self.dist.prev_pp_rank, PPCommTag.SCHEDULE_RESULT)
            for request in scheduled.new_requests if scheduled is not None else ():
                self.active_requests[request.request_id] = request
        self._send_on(self.send_schedule_handles, slot, scheduled, PPCommTag.SCHEDULE_RESULT)
        return None if scheduled is None else [self.active_requests[number] for number in scheduled.request_ids]

    def _handle(self, slot: int, must_get: bool) -> None:
        """Rank 0 handles what has come back, waiting if it has nothing else to do; the others handle as many."""
        if self.dist.is_first_pp_rank:
            batches = []
            while not self.executed_batch_response_queue.empty() or (must_get and self.unhandled_batch_counter):
                batches.append(self._next_executed_batch())
                self._handle_executed_batch(batches[-1])
                must_get = False
            self._executed_batch_num = len(batches)
        self._propagate_executed_batch_num(slot)  # the others handle theirs in it


def _work(seconds: float, hold_gil: bool) -> None:
    """Keep the CPU busy with small torch operations, as making inputs does: each gives the GIL up for a moment.

    With `hold_gil` nobody else gets it meanwhile, as in a long stretch of plain Python.
    """
    row, until = torch.zeros(64), time.monotonic() + seconds
    while time.monotonic() < until:
        if not hold_gil:
            row += 1


class Recorded(UpstreamLoop):
    """What an executor without the patch does to make its sends progress, recorded."""

    def wait_on_pp_send_handles(self, send_handles: list[Any], microbatch_id: int) -> None:
        """Block until a slot's send is complete; the time in it is recorded."""
        if send_handles[microbatch_id] is None:
            return
        with self.dist.inside():
            super().wait_on_pp_send_handles(send_handles, microbatch_id)


def record_drives(executor: UpstreamLoop) -> None:
    """Let bursts of tests count as time inside MPI, where the executor has an engine of ours."""
    from trtllm_pp_progress.pyexecutor.attachment import engine_of

    if (engine := engine_of(executor)) is None:
        return

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*arguments: Any, **named: Any) -> Any:
            with executor.dist.inside():
                return function(*arguments, **named)

        return inside

    engine.burst.run = recorded(engine.burst.run)  # type: ignore[method-assign]
    engine.burst.finish = recorded(engine.burst.finish)  # type: ignore[method-assign]
