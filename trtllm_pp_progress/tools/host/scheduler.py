"""Rank 0's requests: which wait to be scheduled, and what the next batch is."""

from __future__ import annotations

import queue
from collections import deque

from trtllm_pp_progress.tools.host.state import Request, Scheduled

__all__ = ["Scheduler"]


class Scheduler:
    """Admits requests from `requests`, first come first served; None is the order to stop once all are finished."""

    def __init__(self, max_batch_size: int) -> None:
        self.requests: queue.Queue[Request | None] = queue.Queue()
        self.ready: deque[Request] = deque()
        self.stopping = False
        self._max_batch_size = max_batch_size
        self._new: list[Request] = []

    def admit(self, active: dict[int, Request]) -> None:
        """Take in what has been enqueued, and wait for it where nothing is active and no stop was ordered."""
        while not self.requests.empty() or not (active or self.stopping):
            request = self.requests.get()
            if request is None:
                self.stopping = True
                continue
            active[request.request_id] = request
            self._new.append(Request(request.request_id, request.prompt, request.max_tokens))
            self.ready.append(request)

    def schedule(self, payload: bytes = b"") -> Scheduled:
        """Return the next batch, and with it the requests that the other ranks have not heard of."""
        batch = [self.ready.popleft() for _ in range(min(self._max_batch_size, len(self.ready)))]
        new, self._new = self._new, []
        return Scheduled([request.request_id for request in batch], new, not self.ready, payload=payload)
