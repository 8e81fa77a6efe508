"""The stage of the perf case: launches a batch and returns; a CPU does as a GPU does, by a thread in the GPU's place.

The device thread runs what was launched in order: receive, compute, send on. On a GPU it only enqueues that on a stream
(graph replays), so it is there for the links that say with a byte when to begin; with NCCL the executor thread enqueues
by itself, as upstream's does.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from case.device import device_for
from case.links import Link
from case.model import StaticModel
from trtllm_pp_progress.tools.host import Request, Sampled

__all__ = ["CaseStage"]

VARIANTS = 4  # payloads in rotation, known to every rank, so that each one received is compared in full
STAGING = 32  # batches whose inputs may be on their way to the GPU: more than are ever in flight


@dataclass
class _Work:
    """A batch as launched: what the device thread needs, copied, since the executor goes on."""

    step: int
    slots: list[int]
    lengths: list[int]  # rows of each request; more than one is a prompt
    positions: list[int]
    ids: list[int]
    done: threading.Event
    tokens: torch.Tensor | None = None
    arrived: Callable[[], object] | None = None  # waits for the tokens to be on the host
    error: BaseException | None = None

    @property
    def decodes(self) -> bool:
        """Whether every request adds one token to what it has: a step, as the figures have it."""
        return all(self.positions) and all(length == 1 for length in self.lengths)


class CaseStage:
    """One rank's stage (see `trtllm_pp_progress.tools.host.Stage`), with launch() and sampled() for upstream's loop.

    `begin()` starts another run with the same model: caches are reused, counters and notes are new. `spans` are the
    start and end of each batch's computation by step, monotonic seconds, on a GPU taken from CUDA events; `kernels_s`
    are the seconds that the graphs of decode steps took, of all but the last of each.
    """

    def __init__(
        self, model: StaticModel, before: Link | None, after: Link | None, payload_bytes: int, slots: int
    ) -> None:
        self.model = model
        self._before, self._after, self._slots = before, after, slots
        self._payloads = [random.Random(seed).randbytes(payload_bytes) for seed in range(VARIANTS)]
        self._device = device_for(model.device)
        self._inline = all(link is None or link.in_stream_order for link in (before, after))
        self._todo: queue.Queue[_Work | None] = queue.Queue()
        self._captured: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._ids, self._positions, self._tokens = (self._device.staging(STAGING, slots) for _ in range(3))
        self._prompts = self._device.staging(slots if model.first else 0, model.length)
        self.begin()
        if not self._inline:
            threading.Thread(target=self._device_loop, name="device", daemon=True).start()

    def begin(self) -> None:
        """Forget the last run; no batch may be in flight."""
        self._slot_of: dict[int, int] = {}
        self._unused = list(range(self._slots))
        self._step = self._checked = 0
        self._in_flight: deque[_Work] = deque()
        self._timed: list[tuple[int, bool, Any, Any]] = []
        self._ran: set[tuple[int, int]] = set()
        self.kernels_s: list[float] = []
        self._device.begin()

    # The executor's side

    def receive(self, timeout: float | None) -> bool:
        """Return True: a launch waits for nothing."""
        return True

    def forward(self, requests: Sequence[Request]) -> Sampled | None:
        """Launch and wait: what an executor without upstream's loop does."""
        if requests:
            self.launch(requests)
        return self.sampled() if requests and self.model.last else None

    def launch(self, requests: Sequence[Request]) -> None:
        """Start a batch, and return before it has run."""
        for request in requests:
            if request.request_id not in self._slot_of:
                if not self._unused:
                    raise RuntimeError(f"request {request.request_id} has no slot: {self._slots} are in use")
                self._slot_of[request.request_id] = self._unused.pop(0)
        ids: list[int] = []
        for request in requests:
            ids += ([request.tokens[-1]] if request.computed else request.prompt) if self.model.first else []
        work = _Work(
            step=self._step,
            slots=[self._slot_of[request.request_id] for request in requests],
            lengths=[1 if request.computed else len(request.prompt) for request in requests],
            positions=[request.computed for request in requests],
            ids=ids,
            done=threading.Event(),
        )
        self._step += 1
        if self.model.last:
            self._in_flight.append(work)
        if self._inline:
            self._run(work)
        else:
            self._todo.put(work)

    def sampled(self) -> Sampled:
        """Return the sample state of the oldest batch not yet taken, on the host: waits for the device, outside MPI."""
        work = self._in_flight.popleft()
        work.done.wait()
        if work.error is not None:
            raise RuntimeError("the device thread failed") from work.error
        assert work.arrived is not None
        assert work.tokens is not None
        work.arrived()
        return Sampled(work.tokens.tolist(), self._payloads[work.step % VARIANTS], work.step)

    def check(self, host: Sampled) -> int:
        """Compare a received payload with what was sent, and its number with the one due."""
        due, self._checked = self._checked, self._checked + 1
        return int(host.step != due or host.payload != self._payloads[due % VARIANTS])

    def release(self, request: Request) -> None:
        """Give a finished request's place to another."""
        self._unused.append(self._slot_of.pop(request.request_id))
        self._unused.sort()

    def close(self) -> None:
        """End the device thread and the links."""
        self._todo.put(None)
        for link in (self._before, self._after):
            if link is not None:
                link.close()

    def spans(self) -> dict[int, tuple[float, float, bool]]:
        """Return each batch's start and end, monotonic seconds, and whether it was a decode step, by step."""
        steps, decodes, begun, ended = zip(*self._timed, strict=True) if self._timed else ((),) * 4
        moments = zip(self._device.seconds(begun), self._device.seconds(ended), decodes, strict=True)
        return dict(zip(steps, moments, strict=True))

    # The device's side

    def _device_loop(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                self._run(work)
            except BaseException as error:
                work.error = error
                work.done.set()
                raise

    def _run(self, work: _Work) -> None:
        with self._device.stream():
            self._compute(work)
        work.done.set()

    def _compute(self, work: _Work) -> None:
        rows = None
        if self._before is not None:
            rows = torch.empty(sum(work.lengths), self.model.hidden, dtype=self.model.dtype, device=self.model.device)
            self._before.receive(rows)
        begun = self._device.mark()
        first, count = work.slots[0], len(work.slots)
        together = work.decodes and work.slots == list(range(first, first + count))
        output = self._replay(first, count, work, rows) if together else self._eagerly(work, rows)
        ended = self._device.mark()
        self._timed.append((work.step, work.decodes, begun, ended))
        if self._after is not None:
            self._after.send(output)
            return
        work.tokens = self._tokens[work.step % STAGING, :count]
        work.tokens.copy_(output, non_blocking=True)
        work.arrived = self._device.event()

    def _eagerly(self, work: _Work, rows: torch.Tensor | None) -> torch.Tensor:
        # Nothing here may wait for the GPU: with NCCL it waits for the next rank, and that for a schedule that parks.
        model, place = self.model, work.step % STAGING
        self._positions[place, : len(work.positions)] = torch.tensor(work.positions)
        positions = self._positions[place, : len(work.positions)].to(model.device, non_blocking=True)
        if rows is None:
            parts, ids = [], torch.tensor(work.ids).split(work.lengths)
            for slot, part in zip(work.slots, ids, strict=True):
                staged = self._prompts[slot, : len(part)]
                parts.append(staged.copy_(part).to(model.device, non_blocking=True))
            rows = torch.cat(parts)
        outputs = []
        for i, (slot, part) in enumerate(zip(work.slots, rows.split(work.lengths), strict=True)):
            if work.positions[i]:
                outputs.append(model.step(slice(slot, slot + 1), positions[i : i + 1], part))
            else:
                outputs.append(model.prompt(slot, part))
        return torch.cat(outputs)

    def _replay(self, first: int, count: int, work: _Work, rows: torch.Tensor | None) -> torch.Tensor:
        """Run a decode step from what the first such step of these slots has left behind: on a GPU, a graph."""
        place = work.step % STAGING
        self._positions[place, :count] = torch.tensor(work.positions)
        if rows is None:
            self._ids[place, :count] = torch.tensor(work.ids)
            rows = self._ids[place, :count]
        if (first, count) not in self._captured:
            self._captured[first, count] = self._capture(slice(first, first + count), count)
        replay, positions, given, output, took = self._captured[first, count]
        if (first, count) in self._ran:  # and has ended: this step needs its token
            self.kernels_s.append(took())
        self._ran.add((first, count))
        positions.copy_(self._positions[place, :count], non_blocking=True)
        given.copy_(rows, non_blocking=True)
        replay()
        return output  # type: ignore[no-any-return]

    def _capture(self, slots: slice, count: int) -> tuple[Any, ...]:
        model = self.model
        positions = torch.zeros(count, dtype=torch.long, device=model.device)
        shape, dtype = ((count,), torch.long) if model.first else ((count, model.hidden), model.dtype)
        given = torch.zeros(shape, dtype=dtype, device=model.device)
        # What capturing writes at position 0 is put back: that place belongs to a prompt.
        kept = [(t, t[slots, :, 0].clone()) for layer in model.layers for t in (layer.keys, layer.values)]
        replay, output, took = self._device.capture(lambda: model.step(slots, positions, given))
        for tensor, rows in kept:
            tensor[slots, :, 0] = rows
        return replay, positions, given, output, took
