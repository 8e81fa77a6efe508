"""A toy engine: turns a seed into the steps that vLLM's scheduler might send to its workers, values left out.

What it keeps of the real one: chunked prefill, a decode of a request no sooner than pp_size steps after the last,
batches that need no sampled result, aborts, preemption, slots reused in the step that frees them, empty steps, and
silence when nothing is left to do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


@dataclass
class Row:
    """One request in one step."""

    request: int
    slot: int
    computed: int
    tokens: int
    prefill: int
    most: int  # length at which the request ends

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill

    @property
    def samples(self) -> bool:
        return self.computed + self.tokens >= self.prefill


@dataclass
class Step:
    """What one engine step tells a worker."""

    rows: list[Row] = field(default_factory=list)
    freed: list[tuple[int, int]] = field(default_factory=list)  # request, slot
    finished_req_ids: set[int] = field(default_factory=set)  # of those freed; the others were preempted
    added: list[tuple[int, int]] = field(default_factory=list)
    drafts: bool = False
    compiling: frozenset[int] = frozenset()  # ranks on which a kernel of this step is loaded for the first time
    boundary: str = ""  # a call of the worker before this step
    silence: bool = False  # no call after this step until everything under way has ended
    drain: bool = False  # no call before this step until every result is there, as when requests are paused and kept
    deferred: bool = False  # sampled only once an older result is there, as with structured output

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


@dataclass
class _Request:
    number: int
    prompt: int
    most: int
    computed: int = 0
    length: int = 0  # prompt and what was sampled
    slot: int = -1
    eligible: int = 0
    ends: int = -1  # step in which the engine frees it


@dataclass(frozen=True)
class Load:
    """How busy and how unlucky the engine is; probabilities are per step."""

    steps: int = 400
    requests: int = 6  # at most alive
    arrivals: float = 0.5
    aborts: float = 0.04
    preemptions: float = 0.03
    empties: float = 0.05
    skips: float = 0.1  # of a request that could run
    lulls: float = 0.04  # no arrivals until all is done
    boundaries: float = 0.0
    compiles: float = 0.0  # of a rank
    drains: float = 0.0
    deferrals: float = 0.0
    drafts: int = 0


def plan(seed: int, pp_size: int, load: Load) -> list[Step]:
    """Return the steps of one run, ending with everything freed."""
    return _Scheduler(random.Random(seed), pp_size, load).run()


class _Scheduler:
    def __init__(self, dice: random.Random, pp_size: int, load: Load) -> None:
        self.dice, self.pp_size, self.load = dice, pp_size, load
        self.live: list[_Request] = []
        self.waiting: list[_Request] = []
        self.numbers = 0
        self.lull = False

    def run(self) -> list[Step]:
        steps = [self.step(now) for now in range(self.load.steps)]
        freed = [(request.number, request.slot) for request in self.live]
        last = Step(freed=freed, finished_req_ids={number for number, _ in freed}, silence=True)
        return [*steps, last]

    def step(self, now: int) -> Step:
        step = Step(drafts=bool(self.load.drafts) and self.dice.random() < 0.8)
        if self.dice.random() < self.load.boundaries:
            step.boundary = self.dice.choice(("sleep", "wake_up", "synchronize_device", "update_weights"))
        if self.load.compiles:
            ranks = range(self.pp_size)
            step.compiling = frozenset(rank for rank in ranks if self.dice.random() < self.load.compiles)
        step.drain = bool(self.load.drains) and self.dice.random() < self.load.drains
        step.deferred = bool(self.load.deferrals) and self.dice.random() < self.load.deferrals
        self.end(now, step)
        self.arrive(step)
        if self.dice.random() >= self.load.empties:
            self.schedule(now, step)
        if not step.rows and not self.live and not self.waiting:
            step.silence, self.lull = True, False
        return step

    def end(self, now: int, step: Step) -> None:
        for request in list(self.live):
            preempted = self.dice.random() < self.load.preemptions / max(len(self.live), 1)
            if not preempted and request.ends != now and self.dice.random() >= self.load.aborts / len(self.live):
                continue
            self.live.remove(request)
            step.freed.append((request.number, request.slot))
            if not preempted or request.ends >= 0:
                step.finished_req_ids.add(request.number)
            else:
                length = max(request.length, request.prompt)
                self.waiting.append(_Request(request.number, length, max(request.most, length + 1)))

    def arrive(self, step: Step) -> None:
        if self.dice.random() < self.load.lulls:
            self.lull = True
        if not self.lull and self.dice.random() < self.load.arrivals:
            prompt = self.dice.randint(1, 9)
            self.numbers += 1
            self.waiting.append(_Request(self.numbers, prompt, prompt + self.dice.choice((1, 1, 2, 5, 12))))
        while self.waiting and len(self.live) < self.load.requests:
            request = self.waiting.pop(0)
            taken = {other.slot for other in self.live}
            request.slot = next(slot for slot in range(self.load.requests) if slot not in taken)
            self.live.append(request)
            step.added.append((request.number, request.slot))

    def schedule(self, now: int, step: Step) -> None:
        for request in self.live:
            if request.ends >= 0 or request.eligible > now or self.dice.random() < self.load.skips:
                continue
            left = request.prompt - request.computed
            tokens = min(left, 4) if left > 0 else 1
            row = Row(request.number, request.slot, request.computed, tokens, request.prompt, request.most)
            step.rows.append(row)
            request.computed += tokens
            if row.samples:
                request.length = max(request.length, request.prompt) + 1
                request.eligible = now + self.pp_size
                if request.length >= request.most:
                    request.ends = now + self.dice.choice((1, 1, self.pp_size))  # its last result may never be consumed


def batch_of(step: Step, drafts: int) -> Any:
    """Return what vLLM's input batch says of a step, as far as the handler reads it."""
    slots = np.array([row.slot for row in step.rows])
    prefill = np.array([row.prefill for row in step.rows])
    computed = np.array([row.computed for row in step.rows])
    decoding = sum(not row.prefilling for row in step.rows)
    return SimpleNamespace(
        num_reqs=len(step.rows), idx_mapping=torch.from_numpy(slots), idx_mapping_np=slots,
        num_computed_tokens_np=computed, num_scheduled_tokens=np.array([row.tokens for row in step.rows]),
        prefill_len_np=prefill, max_seq_len_np=np.array([row.most for row in step.rows]),
        is_prefilling_np=computed < prefill, num_draft_tokens=drafts * decoding,
    )  # fmt: skip
