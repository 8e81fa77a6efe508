"""Model on paper: when to post the sampled-result receive, for 2 to 16 stages. All that it prints is modelled.

    python perf receive-model           # the table of defaults
    python perf receive-model --pp 4 --order reversed --interference 0.15

Time unit: one stage's model step. A stage runs its steps in order, each when the stage before has run it and its own
result of pp steps ago is in. While a receive is resident on a stage, its model runs slower by the interference.
Receives of a stage are resident one at a time, in order. The broadcast is a chain along the ring; a hop can send ahead
of a receiver that has not posted yet as long as the hop's slots are not full, and stays resident otherwise.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import output

EPS = 1e-9


@dataclass(frozen=True)
class Pipe:
    """What is modelled; `delays` per receiving stage, in steps after the model of step T (0 is vLLM as it is)."""

    delays: tuple[int, ...]
    order: tuple[int, ...]  # of the chain, after the last stage
    interference: float = 0.15  # how much slower a model runs beside a resident receive or send
    hop: float = 0.01  # time of one hop of the chain
    slots: int = 2  # steps that a hop can send ahead of its receiver
    steps: int = 200

    @property
    def pp(self) -> int:
        """The number of stages."""
        return len(self.delays) + 1


@dataclass
class Result:
    """What the model says, per step of a stage in steady state."""

    throughput: float  # steps per time unit; 1 is a pipe that never waits
    residency: list[float]  # of receives on each receiving stage
    source: float  # residency of the source's send
    waited: list[float] = field(default_factory=list)  # for results, by each receiving stage


def forward(pp: int) -> tuple[int, ...]:
    """Return the chain order that follows the pipeline: stage 0 first after the last."""
    return tuple(range(pp - 1))


def simulate(pipe: Pipe) -> Result:
    """Run the pipe to its end and measure its second half."""
    return _Simulation(pipe).run()


class _Simulation:
    def __init__(self, pipe: Pipe) -> None:
        self.pipe, stages, steps = pipe, pipe.pp, pipe.steps
        self.now = 0.0
        self.begun: list[list[float]] = [[] for _ in range(stages)]
        self.ended: list[list[float]] = [[] for _ in range(stages)]
        self.left = [0.0] * stages  # of the model step under way
        self.posted = [0] * stages  # receives whose turn has come, per stage
        self.taken = [0] * stages  # receives that have their data
        self.received = [0] * stages  # receives that are over: data in, and passed on
        self.arrivals: list[tuple[float, int]] = []  # data on its way: when, to which stage
        self.arrived = [0] * stages  # data waiting in a stage's slots
        self.sent = [0] * stages  # data a stage has passed on, or the source has sent
        self.ready: list[list[float]] = [[-1.0] * steps for _ in range(stages)]
        self.resident = [0.0] * stages
        self.waited = [0.0] * stages
        self.last = stages - 1
        self.next = dict(zip((self.last, *pipe.order), pipe.order, strict=False))

    def run(self) -> Result:
        steps, half = self.pipe.steps, self.pipe.steps // 2
        middle: tuple[float, list[float], list[float]] | None = None
        while len(self.ended[self.last]) < steps:
            self._settle()
            if middle is None and len(self.ended[self.last]) >= half:
                middle = self.now, list(self.resident), list(self.waited)
            self._advance()
        assert middle is not None
        since, resident, waited = middle
        span, count = self.now - since, steps - half
        residency = [(now - then) / count for now, then in zip(self.resident, resident, strict=True)]
        waits = [(now - then) / count for now, then in zip(self.waited, waited, strict=True)]
        return Result(count / span, residency[:-1], residency[-1], waits[:-1])

    def _settle(self) -> None:
        """Let everything happen that can happen now."""
        moved = True
        while moved:
            moved = False
            while self.arrivals and self.arrivals[0][0] <= self.now + EPS:
                self.arrived[heapq.heappop(self.arrivals)[1]] += 1
                moved = True
            for stage in range(self.pipe.pp):
                moved |= self._begin(stage) or self._pass_on(stage)
                if stage != self.last:
                    moved |= self._take(stage)

    def _begin(self, stage: int) -> bool:
        step = len(self.begun[stage])
        if step >= self.pipe.steps or len(self.ended[stage]) < step:
            return False
        if stage and len(self.ended[stage - 1]) <= step:
            return False
        if stage != self.last and step >= self.pipe.pp and self.received[stage] <= step - self.pipe.pp:
            return False
        self.begun[stage].append(self.now)
        self.left[stage] = 1.0
        return True

    def _take(self, stage: int) -> bool:
        """Post what is due, and give the receive at the head its data."""
        due = len(self.ended[stage]) - self.pipe.delays[stage]
        if self.posted[stage] < due:
            self.posted[stage] = due
            return True
        # A receive that has its data but cannot pass it on holds up the next one.
        if self.received[stage] == self.taken[stage] < self.posted[stage] and self.arrived[stage]:
            self.arrived[stage] -= 1
            self.taken[stage] += 1
            if stage not in self.next:
                self.received[stage] += 1
            return True
        return False

    def _pass_on(self, stage: int) -> bool:
        """Send the next data on along the chain, if there is any and the hop has room."""
        if stage not in self.next:
            return False
        to = self.next[stage]
        have = len(self.ended[stage]) if stage == self.last else self.taken[stage]
        room = self.sent[stage] < self.taken[to] + self.pipe.slots or self.posted[to] > self.sent[stage]
        if self.sent[stage] >= have or not room:
            return False
        self.sent[stage] += 1
        if stage != self.last:
            self.received[stage] += 1
        heapq.heappush(self.arrivals, (self.now + self.pipe.hop, to))
        return True

    def _occupied(self, stage: int) -> bool:
        if stage == self.last:
            return self.sent[stage] < len(self.ended[stage])
        return self.received[stage] < self.posted[stage]

    def _running(self, stage: int) -> bool:
        return len(self.begun[stage]) > len(self.ended[stage])

    def _waits(self, stage: int) -> bool:
        """Whether the model of a stage could run if its result of pp steps ago were in."""
        step = len(self.begun[stage])
        fed = not stage or len(self.ended[stage - 1]) > step
        return not self._running(stage) and step < self.pipe.steps and fed

    def _advance(self) -> None:
        """Go to the next time at which something ends."""
        stages = range(self.pipe.pp)
        rates = [1 / (1 + self.pipe.interference * self._occupied(stage)) for stage in stages]
        spans = [self.left[stage] / rates[stage] for stage in stages if self._running(stage)]
        if self.arrivals:
            spans.append(self.arrivals[0][0] - self.now)
        if not spans:
            raise RuntimeError(f"the modelled pipe is stuck at {self.now:.2f}: {self.pipe}")
        span = max(min(spans), 0.0)
        for stage in stages:
            self.resident[stage] += span * self._occupied(stage)
            self.waited[stage] += span * self._waits(stage)
        self.now += span
        for stage in stages:
            if self._running(stage):
                self.left[stage] -= span * rates[stage]
                if self.left[stage] <= EPS:
                    self.ended[stage].append(self.now)


def policies(pp: int) -> dict[str, tuple[int, ...]]:
    """Return the delays of each policy, as steps after the model: pre-model d posts where post-model d - 1 does."""
    table: dict[str, tuple[int, ...]] = {"immediate": (0,) * (pp - 1)}
    table[f"pre-model {pp - 1}"] = (pp - 2,) * (pp - 1)
    table[f"post-model {pp - 1}"] = (pp - 1,) * (pp - 1)
    table["rank-aware"] = tuple(pp - 1 - rank for rank in range(pp - 1))
    return table


def main(argv: list[str] | None = None) -> int:
    """Print the modelled table; return 0."""
    parser = argparse.ArgumentParser(description="Modelled effect of posting sampled-result receives later.")
    parser.add_argument("--pp", type=int, action="append", help="stages, several times for several (default 2 4 8 16)")
    parser.add_argument("--order", choices=("forward", "reversed", "both"), default="both", help="of the chain")
    parser.add_argument("--interference", type=float, default=0.15, help="slow-down of a model beside a receive")
    parser.add_argument("--hop", type=float, default=0.01, help="time of one hop, in model steps")
    parser.add_argument("--slots", type=int, default=2, help="steps that a hop sends ahead of its receiver")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(argv)
    given = f"interference {options.interference:g}, hop {options.hop:g}, slots {options.slots}"
    print(f"# modelled, not measured: {given}")
    columns = ("pp", "chain", "policy", "throughput", "residency 0", "worst", "source", "wait")
    print(output.table(columns, list(_rows(options)), left=3))
    return 0


def _rows(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    for pp in options.pp or (2, 4, 8, 16):
        orders = {"forward": forward(pp), "reversed": forward(pp)[::-1]}
        for name, order in orders.items():
            if options.order not in (name, "both") or (pp == 2 and name == "reversed"):
                continue
            for policy, delays in policies(pp).items():
                pipe = Pipe(delays, order, options.interference, options.hop, options.slots, options.steps)
                found = simulate(pipe)
                figures = (found.residency[0], max(found.residency), found.source, max(found.waited))
                yield str(pp), name, policy, f"{found.throughput:.3f}", *(f"{figure:.2f}" for figure in figures)
