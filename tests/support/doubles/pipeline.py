"""What every era's executor does alike: requests, schedules, forwards, executed batches. Nothing here relays."""

import queue
import threading

from doubles.world import BatchStatePP, PPCommTag, RequestBroadcaster, SampleState


class Pipeline:
    """An executor without its relay. `stage` runs batches and hands activations on beside MPI (see RingStage)."""

    def _prepare(self, dist, stage):
        self.dist, self.stage = dist, stage
        self.request_broadcaster = RequestBroadcaster(dist)
        self.new_requests = queue.Queue()
        self.active_requests, self.inflight_req_ids = {}, set()
        self.response_cv, self.finished = threading.Condition(), []
        self.is_shutdown, self.shutdown_event = False, threading.Event()
        self.stopping = self.worker_started = False
        self.top_of_loop = lambda: None  # a collective of disaggregated serving
        self.wrong = self.steps = 0
        self._event_loop_error = None
        self.event_loop = self._executor_loop_pp

    # The callers' side

    def enqueue_requests(self, requests):
        """Hand requests, and None to end, to rank 0."""
        for request in requests:
            self.new_requests.put(request)

    def await_responses(self, count, timeout):
        """Return that many finished requests of rank 0."""
        with self.response_cv:
            assert self.response_cv.wait_for(lambda: len(self.finished) >= count or self.is_shutdown, timeout)
        assert self._event_loop_error is None, self._event_loop_error
        return self.finished

    # The executor thread

    def _event_loop_wrapper(self):
        try:
            self.event_loop()
        except Exception as error:
            self._event_loop_error = error
            raise
        finally:
            self._executor_loop_cleanup()

    def _fetch_new_requests(self):
        if not self.dist.is_first_pp_rank:
            return []
        fetched = [] if self.active_requests else [self.new_requests.get()]
        while not self.new_requests.empty():
            fetched.append(self.new_requests.get())
        return fetched

    def _begin(self, microbatch_id):
        """Begin an iteration: return its batch, which may be empty, or None at the end."""
        self.top_of_loop()
        for request in self.request_broadcaster.broadcast(self._fetch_new_requests()):
            if request is None:
                self.stopping = True
            else:
                self.active_requests[request.request_id] = request
        if self.stopping and not self.active_requests:
            return None
        return self._pp_schedule_and_propagate(microbatch_id)

    def _schedule(self):
        ready = [i for i in self.active_requests if i not in self.inflight_req_ids][:1]
        self.inflight_req_ids.update(ready)
        return ready

    def _forward(self, microbatch_id, batch):
        """Run a batch, and return the executed one whose turn it is to be relayed, if there is one."""
        self.micro_batches[microbatch_id] = None
        if batch:
            self.stage.receive(None)
            host = self.stage.forward(batch)
            if host is not None:
                for request in batch:
                    request.py_result.log_probs.append(host.step)
            self.micro_batches[microbatch_id] = BatchStatePP(microbatch_id, SampleState(batch, host))
            self.steps += 1
        offset = -1 if self.dist.is_last_pp_rank else 1 - self.dist.pp_size
        executed = (microbatch_id + offset) % self.num_micro_batches
        executed_batch, self.micro_batches[executed] = self.micro_batches[executed], None
        return executed_batch

    def _handle_executed_batches(self, microbatch_id, can_queue):
        """Let rank 0 say how many executed batches are handled in this iteration, and handle as many."""
        dist, fetched = self.dist, []
        if dist.is_first_pp_rank:
            must_get = not can_queue or not self.pp_async_broadcast_sample_state
            while not self.executed_batch_response_queue.empty() or (
                must_get and self.unhandled_batch_counter > len(fetched)
            ):
                fetched.append(self.executed_batch_response_queue.get())
                must_get = False
            count = len(fetched)
        else:
            count = dist.recv_object(src=dist.prev_pp_rank, tag=PPCommTag.EXECUTED_BATCH_NUM)
        if not dist.is_last_pp_rank:
            handles = self.send_expected_batch_num_handles
            self.wait_on_pp_send_handles(handles, microbatch_id)
            handles[microbatch_id] = dist.isend_object(count, dest=dist.next_pp_rank, tag=PPCommTag.EXECUTED_BATCH_NUM)
        for index in range(count):
            self._handle_executed_batch(fetched[index] if fetched else self.executed_batch_response_queue.get())
        self.unhandled_batch_counter -= count

    def _handle_remaining(self):
        while self.unhandled_batch_counter > 0:
            self._handle_executed_batch(self.executed_batch_response_queue.get())
            self.unhandled_batch_counter -= 1

    def _handle_executed_batch(self, executed_batch):
        state = executed_batch.sample_state
        if not self.dist.is_last_pp_rank:
            self.wrong += self.stage.check(state.host)
        for request, token in zip(state.requests, state.host.new_tokens, strict=True):
            request.tokens.append(token)
            self.wrong += request.py_result.log_probs != request.tokens
            self.inflight_req_ids.discard(request.request_id)
            if len(request.tokens) == request.max_tokens:
                del self.active_requests[request.request_id]
                with self.response_cv:
                    self.finished.append(request)
                    self.response_cv.notify_all()
