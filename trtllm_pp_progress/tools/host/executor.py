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
from collections.abc import Callable, Iterable

from trtllm_pp_progress.tools.host.dist import Dist
from trtllm_pp_progress.tools.host.loop import PipelineLoop
from trtllm_pp_progress.tools.host.scheduler import Scheduler
from trtllm_pp_progress.tools.host.state import Request, Stage

__all__ = ["HostExecutor"]


class HostExecutor(PipelineLoop):
    """Era E: a relayed send is left alone until its slot is used again.

    Construct it on every rank, on the main thread (the communicator's duplicate is collective), then start_worker();
    rank 0 enqueues requests and awaits responses; shutdown() on every rank.
    """

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
        super().__init__(dist, stage, Scheduler(max_batch_size), reentry_s, late, after_forward, schedule_payload)
        self.worker_started = False

    def start_worker(self) -> None:
        """Start the relay thread, then the executor thread; collective over the pipeline."""
        self.executed_batch_queue = queue.Queue(maxsize=self.num_micro_batches)
        self.executed_batch_response_queue = queue.Queue(maxsize=-1)
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
        self._stop_relay()
        self.worker_started = False

    def _stop_relay(self) -> None:
        self.executed_batch_queue.put(None)
        self.broadcast_sample_state_handler.join()

    def raise_error(self) -> None:
        """Raise RuntimeError from what ended the loop too early, if anything: messages may have been left behind."""
        if self.error is not None:
            raise RuntimeError(f"the executor loop of rank {self.dist.pp_rank} failed") from self.error
