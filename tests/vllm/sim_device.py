"""GPUs that are simulated: streams, hardware queues and collectives, without time and without a real wait.

A device holds what its host has issued, in order. An operation may start once everything before it in its hardware
queue has been completed; with a queue for each stream that is the stream's own order, with one queue for all it is the
order of issue, as with CUDA_DEVICE_MAX_CONNECTIONS=1. What an operation does to data it does when it is completed, so
that whoever reads too early reads what is not there yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MANY, ONE = "many", "one"


@dataclass(eq=False)
class Op:
    """Something on a queue: `ready` says whether it can be completed now that it has started."""

    ready: Callable[[Op], bool]
    do: Callable[[], None]
    name: str
    started: bool = False
    done: bool = False


class Event:
    """Covers what was on a stream when it was recorded; nothing before that, like a CUDA event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.op: Op | None = None

    def record(self, stream: Stream) -> None:
        self.op = stream.issue("event")

    def query(self) -> bool:
        return self.op is None or self.op.done

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Stream:
    """Operations of one device in their order."""

    def __init__(self, device: Device) -> None:
        self.device = None  # what the package asks for, to set a thread's device: nothing to set here
        self.on = device
        self.last: Op | None = None

    def issue(self, name: str, ready: Callable[[Op], bool] = lambda op: True, do: Any = lambda: None) -> Op:
        self.last = self.on.put(self, Op(ready, do, name))
        return self.last

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        if not isinstance(event, Event):
            event.wait(self)
        elif event.op is not None:
            target = event.op
            self.issue(f"wait for {target.name}", lambda op: target.done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.last is None or self.last.done


class Device:
    """One GPU: its hardware queues, and what keeps each from going on."""

    def __init__(self, rank: int, queues: str) -> None:
        self.rank = rank
        self._one = queues == ONE
        self._queues: dict[Any, deque[Op]] = {}
        self.main = self.current = Stream(self)

    def put(self, stream: Stream, op: Op) -> Op:
        self._queues.setdefault(None if self._one else id(stream), deque()).append(op)
        return op

    def advance(self) -> bool:
        """Complete one operation at the head of a queue; say whether there was one."""
        for queue in self._queues.values():
            if queue:
                head = queue[0]
                head.started = True
                if head.ready(head):
                    queue.popleft()
                    head.do()
                    head.done = True
                    return True
        return False

    def start(self) -> None:
        """Let what is at the head of each queue meet its peers."""
        for queue in self._queues.values():
            if queue:
                queue[0].started = True

    def stuck(self) -> list[str]:
        return [queue[0].name for queue in self._queues.values() if queue]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Link:
    """Messages from one rank to the next: a sender and its receiver wait for each other."""

    def __init__(self) -> None:
        self.sends: list[Op] = []
        self.receives: list[Op] = []
        self.payloads: dict[int, Any] = {}

    def send(self, stream: Stream, payload: Callable[[], Any], name: str) -> Op:
        number = len(self.sends)

        def ready(op: Op) -> bool:
            return number < len(self.receives) and self.receives[number].started

        def do() -> None:
            self.payloads[number] = payload()

        self.sends.append(stream.issue(name, ready, do))
        return self.sends[-1]

    def receive(self, stream: Stream, take: Callable[[Any], None], name: str) -> Op:
        number = len(self.receives)
        # It has started once it is at the head; the sender then hands over and both go on.
        op = stream.issue(name, lambda op: number in self.payloads, lambda: take(self.payloads.pop(number)))
        self.receives.append(op)
        return op


@dataclass
class Broadcasts:
    """One communicator: a source, receivers, and a transport that takes `limit` broadcasts without a receiver."""

    receivers: list[int]
    limit: int
    sent: list[Op] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    taken: dict[int, list[Op]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = {rank: [] for rank in self.receivers}

    def send(self, stream: Stream, value: Callable[[], Any], name: str) -> None:
        number = len(self.sent)

        def ready(op: Op) -> bool:
            return all(self._met(rank, number) for rank in self.receivers)

        def do() -> None:
            self.values[number] = value()

        self.sent.append(stream.issue(name, ready, do))

    def receive(self, rank: int, stream: Stream, fill: Callable[[Any], None], name: str) -> None:
        number = len(self.taken[rank])
        op = stream.issue(name, lambda op: number in self.values, lambda: fill(self.values[number]))
        self.taken[rank].append(op)

    def _met(self, rank: int, number: int) -> bool:
        mine = self.taken[rank]
        if number < len(mine) and mine[number].started:
            return True
        oldest = number - self.limit  # whose buffer this one takes
        return self.limit > 0 and (oldest < 0 or (oldest < len(mine) and mine[oldest].done))
