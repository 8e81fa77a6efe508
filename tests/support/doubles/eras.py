"""The executor of each era. A class says what is new in its era; executor_class() makes one whole class of it.

Sources: see ASSUMPTIONS.md.
"""

import atexit
import os
import threading
import traceback
from queue import Queue

from doubles.pipeline import Pipeline
from doubles.pp_utils import (
    MpiProgressThread,
    _resolve_pp_mpi_progress_interval_us,
    get_with_mpi_progress,
    make_mpi_progress_exit_hook,
    make_mpi_progress_pump,
)
from doubles.world import PPCommTag, mpi_comm, nvtx_range, set_thread_local_mpi_comm


class A1(Pipeline):
    """The executor thread relays, and waits for what it sent before the iteration ends."""

    def __init__(self, dist, stage=None):
        self._prepare(dist, stage)
        self.num_micro_batches = dist.pp_size
        self.micro_batches = [None] * self.num_micro_batches
        self.send_handles = [None] * self.num_micro_batches
        self.send_schedule_handler = None

    def start_worker(self):
        """Start the executor thread."""
        self.worker_thread = threading.Thread(target=self._event_loop_wrapper, daemon=True)
        self.worker_thread.start()

    def shutdown(self):
        """End the executor thread."""
        self.enqueue_requests([None])
        self.shutdown_event.wait()
        self.worker_thread.join()

    def _begin(self, microbatch_id):
        for request in self.request_broadcaster.broadcast(self._fetch_new_requests()):
            if request is None:
                return None
            self.active_requests[request.request_id] = request
        return self._share_schedule()

    def _share_schedule(self):
        dist = self.dist
        scheduled = self._schedule() if dist.is_first_pp_rank else dist.recv_object(dist.prev_pp_rank, 21000)
        if not dist.is_last_pp_rank:
            if self.send_schedule_handler is not None:
                self.send_schedule_handler.wait()
            self.send_schedule_handler = dist.isend_object(scheduled, dist.next_pp_rank, 21000)
        return [self.active_requests[request_id] for request_id in scheduled]

    def _executor_loop_pp(self):
        microbatch_id = 0
        while (batch := self._begin(microbatch_id)) is not None:
            executed_batch = self._forward(microbatch_id, batch)
            if executed_batch is not None:
                self._pass_on(executed_batch)
                self._handle_executed_batch(executed_batch)
                self.wait_on_pp_send_handles(executed_batch.microbatch_id)
            microbatch_id = (microbatch_id + 1) % self.num_micro_batches

    def _pass_on(self, executed_batch):
        dist, slot, state = self.dist, executed_batch.microbatch_id, executed_batch.sample_state
        if not dist.is_last_pp_rank:
            state.host = dist.recv_object(dist.prev_pp_rank, 21001 + slot)
            for request in state.requests:
                request.py_result.log_probs.append(state.host.step)
        if not dist.is_second_last_pp_rank:
            self.wait_on_pp_send_handles(slot)
            self.send_handles[slot] = dist.isend_object(state.host, dist.next_pp_rank, 21001 + slot)

    @nvtx_range("wait_on_pp_send_handles")
    def wait_on_pp_send_handles(self, microbatch_id):
        """Block until a slot's send is complete."""
        if self.send_handles[microbatch_id] is not None:
            self.send_handles[microbatch_id].wait()
            self.send_handles[microbatch_id] = None

    def _executor_loop_cleanup(self):
        for i in range(self.num_micro_batches):
            self.wait_on_pp_send_handles(i)
        if self.send_schedule_handler is not None:
            self.send_schedule_handler.wait()
        with self.response_cv:
            self.is_shutdown = True
            self.response_cv.notify_all()
        self.shutdown_event.set()


class A2(A1):
    """The first rank's schedule is propagated."""

    def _begin(self, microbatch_id):
        for request in self.request_broadcaster.broadcast(self._fetch_new_requests()):
            if request is None:
                return None
            self.active_requests[request.request_id] = request
        return self._pp_schedule_and_propagate()

    def _pp_schedule_and_propagate(self):
        return self._share_schedule()


class B(Pipeline):
    """A relay thread, which leaves what it sent to itself. Era D is the same again."""

    MIN_ASYNC_MICRO_BATCH_NUM = 1024

    def __init__(self, dist, stage=None):
        self._prepare(dist, stage)
        self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        self.micro_batches = [None] * self.num_micro_batches
        self.send_handles = [None] * self.num_micro_batches
        self.send_schedule_handles = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles = [None] * self.num_micro_batches
        self.unhandled_batch_counter = 0
        if dist.pp_size > 1:
            self.pp_async_broadcast_sample_state = os.environ.get("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", "1") == "1"

    def start_worker(self):
        """Start the relay thread, then the executor thread."""
        self.executed_batch_queue = Queue(maxsize=self.num_micro_batches)
        self.executed_batch_response_queue = Queue(maxsize=-1)
        self._start_threads()

    def _start_threads(self):
        self.broadcast_sample_state_handler = threading.Thread(
            target=self._broadcast_sample_state_loop, daemon=True, name="broadcast_sample_state_handler"
        )
        self.broadcast_sample_state_handler.start()
        self.worker_thread = threading.Thread(target=self._event_loop_wrapper, daemon=True)
        self.worker_thread.start()
        self.worker_started = True

    def shutdown(self):
        """End the executor thread, then the relay thread; no join has an end of its own."""
        self.enqueue_requests([None])
        self.shutdown_event.wait()
        self.worker_thread.join()
        self.executed_batch_queue.put(None)
        self.broadcast_sample_state_handler.join()
        self.worker_started = False

    def _pp_schedule_and_propagate(self, microbatch_id):
        dist = self.dist
        if dist.is_first_pp_rank:
            scheduled = self._schedule()
        else:
            scheduled = dist.recv_object(dist.prev_pp_rank, PPCommTag.SCHEDULE_RESULT)
        if not dist.is_last_pp_rank:
            self.wait_on_pp_send_handles(self.send_schedule_handles, microbatch_id)
            self.send_schedule_handles[microbatch_id] = dist.isend_object(
                scheduled, dist.next_pp_rank, PPCommTag.SCHEDULE_RESULT
            )
        return [self.active_requests[request_id] for request_id in scheduled]

    def _executor_loop_pp(self):
        microbatch_id = 0
        while (batch := self._begin(microbatch_id)) is not None:
            executed_batch = self._forward(microbatch_id, batch)
            if executed_batch is not None:
                self.executed_batch_queue.put(executed_batch)
                self.unhandled_batch_counter += 1
            self._handle_executed_batches(microbatch_id, bool(batch))
            microbatch_id = (microbatch_id + 1) % self.num_micro_batches
        self._handle_remaining()

    def _broadcast_sample_state_loop(self):
        set_thread_local_mpi_comm(mpi_comm().Dup())
        while True:
            executed_batch = self.executed_batch_queue.get()
            if executed_batch is None:
                break
            self._ring_broadcast_sample_state(executed_batch)
        # Upstream frees the communicator here, which #13267 found to be a fault; not modelled.
        set_thread_local_mpi_comm(None)

    def _ring_broadcast_sample_state(self, executed_batch):
        if executed_batch is None:
            return
        dist, sample_state = self.dist, executed_batch.sample_state
        if not dist.is_last_pp_rank:
            with nvtx_range("recv_sample_state"):
                sample_state.host, diffs = dist.recv_object(src=dist.prev_pp_rank, tag=PPCommTag.SAMPLE_STATE)
            for request, diff in zip(sample_state.requests, diffs, strict=True):
                request.py_result.apply_diff(diff)
        self.executed_batch_response_queue.put(executed_batch)
        if not dist.is_second_last_pp_rank:
            diffs = [request.py_result.get_diff() for request in sample_state.requests]
            for request in sample_state.requests:
                request.py_result.reset_diff()
            self.wait_on_pp_send_handles(self.send_handles, executed_batch.microbatch_id)
            self.send_handles[executed_batch.microbatch_id] = dist.isend_object(
                (sample_state.host, diffs), dest=dist.next_pp_rank, tag=PPCommTag.SAMPLE_STATE
            )

    @nvtx_range("wait_on_pp_send_handles")
    def wait_on_pp_send_handles(self, send_handles, microbatch_id):
        """Block until a slot's send is complete."""
        if send_handles[microbatch_id] is not None:
            send_handles[microbatch_id].wait()
            send_handles[microbatch_id] = None

    def _executor_loop_cleanup(self):
        for i in range(self.num_micro_batches):
            self.wait_on_pp_send_handles(self.send_handles, i)
            self.wait_on_pp_send_handles(self.send_schedule_handles, i)
            self.wait_on_pp_send_handles(self.send_expected_batch_num_handles, i)
        with self.response_cv:
            self.is_shutdown = True
            self.response_cv.notify_all()
        self.shutdown_event.set()


class C(B):
    """With nothing left to relay, block until the send is complete."""

    def _broadcast_sample_state_loop(self):
        set_thread_local_mpi_comm(mpi_comm().Dup())
        while True:
            executed_batch = self.executed_batch_queue.get()
            if executed_batch is None:
                break
            self._ring_broadcast_sample_state(executed_batch)
            if self.executed_batch_queue.empty():
                self.wait_on_pp_send_handles(self.send_handles, executed_batch.microbatch_id)
        set_thread_local_mpi_comm(None)


class E1(B):
    """The communicator is duplicated on the main thread, and kept."""

    def __init__(self, dist, stage=None):
        self._prepare(dist, stage)
        self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        self.micro_batches = [None] * self.num_micro_batches
        self.send_handles = [None] * self.num_micro_batches
        self.send_schedule_handles = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles = [None] * self.num_micro_batches
        self.unhandled_batch_counter = 0
        if dist.pp_size > 1:
            self.pp_async_broadcast_sample_state = os.environ.get("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", "1") == "1"
        self._broadcast_mpi_comm = None

    def start_worker(self):
        """Duplicate the communicator, start the relay thread, then the executor thread."""
        self.executed_batch_queue = Queue(maxsize=self.num_micro_batches)
        self.executed_batch_response_queue = Queue(maxsize=-1)
        self._broadcast_mpi_comm = mpi_comm().Dup()
        self._start_threads()

    def _broadcast_sample_state_loop(self):
        set_thread_local_mpi_comm(self._broadcast_mpi_comm)
        try:
            while True:
                executed_batch = self.executed_batch_queue.get()
                if executed_batch is None:
                    break
                self._ring_broadcast_sample_state(executed_batch)
        finally:
            set_thread_local_mpi_comm(None)


class E2(E1):
    """The cleanup tells its waiters first, and survives a wait that raises."""

    def _executor_loop_cleanup(self):
        with self.response_cv:
            self.is_shutdown = True
            self.response_cv.notify_all()
        self.shutdown_event.set()
        for i in range(self.num_micro_batches):
            try:
                self.wait_on_pp_send_handles(self.send_handles, i)
                self.wait_on_pp_send_handles(self.send_schedule_handles, i)
                self.wait_on_pp_send_handles(self.send_expected_batch_num_handles, i)
            except Exception:
                traceback.print_exc()


class F(E2):
    """Unless told otherwise the executor thread relays, and drains every slot before a forward."""

    def __init__(self, dist, stage=None):
        self._prepare(dist, stage)
        self.pp_async_broadcast_sample_state = os.environ.get("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", "0") == "1"
        if self.pp_async_broadcast_sample_state:
            self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        else:
            self.num_micro_batches = dist.pp_size
        self.micro_batches = [None] * self.num_micro_batches
        self.send_handles = [None] * self.num_micro_batches
        self.send_schedule_handles = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles = [None] * self.num_micro_batches
        self.unhandled_batch_counter = 0
        self._broadcast_mpi_comm = None

    def _executor_loop_pp(self):
        microbatch_id = 0
        while (batch := self._begin(microbatch_id)) is not None:
            if batch and not self.pp_async_broadcast_sample_state:
                for mb in range(self.num_micro_batches):
                    self.wait_on_pp_send_handles(self.send_handles, mb)
            executed_batch = self._forward(microbatch_id, batch)
            if executed_batch is not None:
                if self.pp_async_broadcast_sample_state:
                    self.executed_batch_queue.put(executed_batch)
                else:
                    self._ring_broadcast_sample_state(executed_batch)
                self.unhandled_batch_counter += 1
            self._handle_executed_batches(microbatch_id, bool(batch))
            microbatch_id = (microbatch_id + 1) % self.num_micro_batches
        self._handle_remaining()


class G(F):
    """The last rank drains the one slot that is due."""

    def _drain_relay_sends_before_forward(self, microbatch_id):
        slots = range(self.num_micro_batches)
        if self.dist.is_last_pp_rank:
            slots = [(microbatch_id + 1 - self.dist.pp_size) % self.num_micro_batches]
        for mb in slots:
            self.wait_on_pp_send_handles(self.send_handles, mb)

    def _executor_loop_pp(self):
        microbatch_id = 0
        while (batch := self._begin(microbatch_id)) is not None:
            if batch and not self.pp_async_broadcast_sample_state:
                self._drain_relay_sends_before_forward(microbatch_id)
            executed_batch = self._forward(microbatch_id, batch)
            if executed_batch is not None:
                if self.pp_async_broadcast_sample_state:
                    self.executed_batch_queue.put(executed_batch)
                else:
                    self._ring_broadcast_sample_state(executed_batch)
                self.unhandled_batch_counter += 1
            self._handle_executed_batches(microbatch_id, bool(batch))
            microbatch_id = (microbatch_id + 1) % self.num_micro_batches
        self._handle_remaining()


class H(G):
    """A pump ticks while the relay thread idles."""

    def __init__(self, dist, stage=None):
        self._prepare(dist, stage)
        self.pp_async_broadcast_sample_state = os.environ.get("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", "0") == "1"
        if self.pp_async_broadcast_sample_state:
            self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        else:
            self.num_micro_batches = dist.pp_size
        self.micro_batches = [None] * self.num_micro_batches
        self.send_handles = [None] * self.num_micro_batches
        self.send_schedule_handles = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles = [None] * self.num_micro_batches
        self.unhandled_batch_counter = 0
        self._broadcast_mpi_comm = None
        self._pp_mpi_progress = None
        self._pp_mpi_progress_stop = threading.Event()
        self._pp_mpi_progress_quiesced = threading.Event()

    def start_worker(self):
        """Make the pump for the relay thread's communicator, and see that it stops before MPI does."""
        self.executed_batch_queue = Queue(maxsize=self.num_micro_batches)
        self.executed_batch_response_queue = Queue(maxsize=-1)
        self._broadcast_mpi_comm = mpi_comm().Dup()
        assert self._broadcast_mpi_comm is not mpi_comm()
        stop, quiesced = threading.Event(), threading.Event()
        self._pp_mpi_progress_stop, self._pp_mpi_progress_quiesced = stop, quiesced
        self._pp_mpi_progress = make_mpi_progress_pump(self._broadcast_mpi_comm, stop, quiesced)
        if self._pp_mpi_progress is not None:
            atexit.register(make_mpi_progress_exit_hook(stop, quiesced, self._pp_mpi_progress[1]))
        self._start_threads()

    def shutdown(self):
        """End the executor thread, the pump, then the relay thread."""
        self.enqueue_requests([None])
        self.shutdown_event.wait()
        self.worker_thread.join()
        self._pp_mpi_progress_stop.set()
        self.executed_batch_queue.put(None)
        self.broadcast_sample_state_handler.join()
        self._pp_mpi_progress_quiesced.set()
        self.worker_started = False

    def _broadcast_sample_state_loop(self):
        set_thread_local_mpi_comm(self._broadcast_mpi_comm)
        try:
            while True:
                executed_batch = get_with_mpi_progress(
                    self.executed_batch_queue, self._pp_mpi_progress, self._pp_mpi_progress_stop
                )
                if executed_batch is None:
                    break
                self._ring_broadcast_sample_state(executed_batch)
        finally:
            set_thread_local_mpi_comm(None)


class I(H):  # noqa: E742  # the era's name
    """A native thread ticks as well, all the time."""

    def __init__(self, dist, stage=None):
        self._prepare(dist, stage)
        self.pp_async_broadcast_sample_state = os.environ.get("TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE", "0") == "1"
        if self.pp_async_broadcast_sample_state:
            self.num_micro_batches = max(dist.pp_size, self.MIN_ASYNC_MICRO_BATCH_NUM)
        else:
            self.num_micro_batches = dist.pp_size
        self.micro_batches = [None] * self.num_micro_batches
        self.send_handles = [None] * self.num_micro_batches
        self.send_schedule_handles = [None] * self.num_micro_batches
        self.send_expected_batch_num_handles = [None] * self.num_micro_batches
        self.unhandled_batch_counter = 0
        self._broadcast_mpi_comm = None
        self._pp_mpi_progress = None
        self._pp_mpi_progress_stop = threading.Event()
        self._pp_mpi_progress_quiesced = threading.Event()
        self._mpi_progress_thread = None

    def start_worker(self):
        """Start the native thread as well, once the pump is made."""
        self.executed_batch_queue = Queue(maxsize=self.num_micro_batches)
        self.executed_batch_response_queue = Queue(maxsize=-1)
        self._broadcast_mpi_comm = mpi_comm().Dup()
        assert self._broadcast_mpi_comm is not mpi_comm()
        stop, quiesced = threading.Event(), threading.Event()
        self._pp_mpi_progress_stop, self._pp_mpi_progress_quiesced = stop, quiesced
        self._pp_mpi_progress = make_mpi_progress_pump(self._broadcast_mpi_comm, stop, quiesced)
        if self._pp_mpi_progress is not None:
            atexit.register(make_mpi_progress_exit_hook(stop, quiesced, self._pp_mpi_progress[1]))
        self._mpi_progress_thread = self._start_mpi_progress_thread()
        self._start_threads()

    def _start_mpi_progress_thread(self):
        interval_us = _resolve_pp_mpi_progress_interval_us()
        if interval_us <= 0 or self.dist.pp_size == 1:
            return None
        thread = MpiProgressThread(mpi_comm().py2f(), interval_us, PPCommTag.MPI_PROGRESS_PROBE)
        atexit.register(thread.stop)
        return thread

    def shutdown(self):
        """End the executor thread, the pump, then the relay thread."""
        self.enqueue_requests([None])
        self.shutdown_event.wait()
        self.worker_thread.join()
        self._pp_mpi_progress_stop.set()
        self.executed_batch_queue.put(None)
        self.broadcast_sample_state_handler.join()
        self._pp_mpi_progress_quiesced.set()
        if self._mpi_progress_thread is not None:
            self._mpi_progress_thread.stop()
        self.worker_started = False


_BY_NAME = {"A1": A1, "A2": A2, "B/D": B, "C": C, "E1": E1, "E2": E2, "F": F, "G": G, "H": H, "I": I}
ERAS = tuple(_BY_NAME)
PATCHED = tuple(era for era in ERAS if era not in ("A1", "A2"))
INLINE = ("F", "G", "H", "I")  # unless TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE is 1


def executor_class(era):
    """Return a fresh class of an era that has everything in itself, as upstream's has."""
    body = {}
    for base in reversed(_BY_NAME[era].__mro__[:-1]):
        body |= vars(base)
    held = {"__dict__", "__weakref__"}
    return type("PyExecutor", (), {name: value for name, value in body.items() if name not in held})
