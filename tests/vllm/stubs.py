"""A handler and a worker of vLLM's shape without vLLM, for what real ones do not show on a CPU."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import torch.distributed


class Event:
    """An event that only knows whether it was recorded behind its broadcasts."""

    def __init__(self, covers):
        self.covers = covers

    def query(self):
        return True

    def record(self, stream):
        self.covers = list(stream.issued)

    def elapsed_time(self, end):
        return 0.0


class Stream:
    """A stream that keeps what was issued on it and what it waited for."""

    def __init__(self):
        self.issued = []
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)

    def wait_event(self, event):
        self.waited.append(event)

    def record_event(self):
        return Event(list(self.issued))

    def query(self):
        return True


class PendingRecv:
    """A step's slot."""

    def __init__(self, event, tokens):
        self.event, self.tokens = event, tokens


class PPHandler:
    """Receives `broadcasts` tensors a step, as vLLM's does, and keeps a slot for each step."""

    is_last_rank = False
    needed = True

    def __init__(self, depth=4, broadcasts=2):
        self.main_stream, self.broadcast_stream = Stream(), Stream()
        self.broadcast_group = object()
        self.queue = deque([None] * depth)
        self.broadcasts = broadcasts
        self.step = 0

    def on_req_idx_freed(self, index):
        pass

    def broadcast(self, *args):
        for number in range(2 if self.needed else 0):
            torch.distributed.broadcast(("sent", number), src=3, group=self.broadcast_group)
        return "sent"

    def broadcast_drafts(self, *args):
        torch.distributed.broadcast("drafts", src=3, group=self.broadcast_group)
        return "drafts sent"

    def receive(self, needed=True):
        if not needed:
            return False
        for number in range(self.broadcasts):
            torch.distributed.broadcast((self.step, number), src=3, group=self.broadcast_group)
        event = self.broadcast_stream.record_event()
        self.queue[-1] = PendingRecv(event, self.step)
        return True

    def get_prev_sampled_outputs(self):
        self.step += 1
        slot = self.queue.popleft()
        self.queue.append(None)
        if slot is None:
            return None
        self.main_stream.wait_event(slot.event)
        return {"tokens": slot.tokens}


def make_worker(handler, calls=None):
    """Return a worker around a handler; every method notes its name in `calls`."""
    calls = [] if calls is None else calls
    runner = SimpleNamespace(
        pp_handler=handler, is_pooling_model=False, req_states=SimpleNamespace(req_id_to_index={"request": 0})
    )
    worker = SimpleNamespace(
        model_runner=runner,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=4),
            scheduler_config=SimpleNamespace(max_num_seqs=256),
        ),
    )
    for name in ("compile_or_warm_up_model", "execute_model", "shutdown", "sleep", "wake_up", "synchronize_device",
                 "update_weights", "execute_dummy_batch", "check_health",
                 "take_draft_token_ids"):  # fmt: skip
        setattr(worker, name, lambda *args, name=name: (calls.append(name), name)[1])
    return worker
