"""What is known of the sends of one table."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from trtllm_pp_progress.driver.tester import NativeTest
from trtllm_pp_progress.progress.handles import Completion, UnknownShapeError, completion_of
from trtllm_pp_progress.progress.histogram import Histogram
from trtllm_pp_progress.progress.keeper import KEEPER, Kept

__all__ = ["UNTESTED", "Counters", "Pending", "Sends"]

# Sends of one table are alike, more or less. Where they are not complete at once a test is in the way: it takes 15 to
# 50 us inside MPI, and whoever waits for the send spends as long there again (eras G to I, 64 KiB, 2 cores).
UNTESTED = 32


@dataclass
class Counters:
    """What happened in one table; fields only grow. Times are in seconds, from posted to seen complete."""

    posts: int = 0
    completions: int = 0
    drives: int = 0
    polls: int = 0
    exhausted: int = 0  # drives that ended with a send still pending: budget spent, or out of time
    busy: int = 0  # drives that found another thread at work and left (approximate: counted without the lock)
    stalls: int = 0  # stall warnings
    abandoned: int = 0
    displaced: int = 0  # pending sends whose slot was overwritten
    failed: int = 0  # handles that raised
    unknown: int = 0  # handles left to upstream's own wait
    parked_s: float = 0.0
    parked_max_s: float = 0.0


@dataclass(eq=False, slots=True)
class Pending:
    """A send that was posted and is not known to be complete; times are of the engine's clock."""

    slot: int
    handle: Any
    completion: Completion
    posted: float
    warned: float
    polls: int = 0


@dataclass(eq=False)
class Sends:
    """What is known of the sends of one table.

    `fresh` holds what was posted and not looked at yet, `pending` what is known not to be complete, by slot, the one
    that was tested longest ago first: looking for work costs nothing for empty slots (upstream keeps 1,024). `left` has
    the handles, by slot, that cannot be tested or have failed, which are upstream's to wait for. `lock` belongs to the
    one thread that may test or wait: two threads in one request at once is erroneous (MPI 4.1, section 11.6). `at_once`
    counts sends that were complete at their first test, of which there are none while tests are `slow` here,
    driving is `off` or writes go `untested`. `took` is how long the others took, from posted to seen complete.
    """

    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: Counters = field(default_factory=Counters)
    fresh: list[tuple[int, Any, float]] = field(default_factory=list)
    pending: OrderedDict[int, Pending] = field(default_factory=OrderedDict)
    left: dict[int, Any] = field(default_factory=dict)
    at_once: int = 0
    slow: bool = False
    off: bool = False
    untested: int = 0  # writes to come that are not tested
    urgent: bool = False  # tested by whoever posts them, from C and for longer: the next step waits for them
    took: Histogram = field(default_factory=Histogram)
    native: NativeTest | None = None  # where tests take no GIL; of whoever holds the lock

    def __len__(self) -> int:
        """How many sends may be pending."""
        return len(self.fresh) + len(self.pending)

    def slots(self) -> list[int]:
        """Return the slots of the sends that may be pending."""
        return [slot for slot, _, _ in list(self.fresh)] + list(self.pending)

    def in_vain(self) -> None:
        """Note that a send was tested in vain as it was posted: the next UNTESTED are not, where a native driver is."""
        if self.native:  # else a relay thread would be woken for sends that are complete
            self.untested = UNTESTED

    def discover(self, slot: int, handle: Any, now: float) -> None:
        """Note what is in a slot of a plain list, which does not report what is written to it."""
        if handle is not None and slot not in self.pending and not self.is_left(slot, handle):
            self.fresh.append((slot, handle, now))

    def look_at_fresh(self, refuse: Callable[[Sends, int, Any, Exception], object]) -> None:
        """Move what is fresh to what is pending; `refuse(self, slot, handle, why)` is called for what has no test."""
        while self.fresh:
            slot, handle, posted = self.fresh[0]  # it stays visible until it is pending
            if not self.is_left(slot, handle):  # a first test has raised
                self._look_at(slot, handle, posted, refuse)
            self.counters.posts += 1
            del self.fresh[0]

    def _look_at(
        self, slot: int, handle: Any, posted: float, refuse: Callable[[Sends, int, Any, Exception], object]
    ) -> None:
        try:
            completion = completion_of(handle)
        except UnknownShapeError as error:
            refuse(self, slot, handle, error)
        else:
            self.displace(slot)  # overwritten before anybody looked
            self.left.pop(slot, None)
            self.pending[slot] = Pending(slot, handle, completion, posted, posted)

    def records(self, only: int | None) -> list[Pending]:
        """Return what is pending, in one slot or in all; others may write to slots while these are tested."""
        records = list(self.pending.values()) if only is None else [self.pending.get(only)]
        return [record for record in records if record is not None]

    def is_pending(self, record: Pending) -> bool:
        """Whether a record is still one of these."""
        return self.pending.get(record.slot) is record

    def tested(self, record: Pending) -> None:
        """Note that a send was tested in vain: the others come first next time."""
        with contextlib.suppress(KeyError):  # a wait that has no time for the lock may just have given it up
            if self.is_pending(record):
                self.pending.move_to_end(record.slot)

    def complete(self, record: Pending, now: float) -> None:
        """Note that a pending send was seen complete."""
        if self.is_pending(record):
            self.pending.pop(record.slot, None)
        self.count_completion(record.posted, now)

    def finished(self, slot: int, handle: Any, now: float) -> None:
        """Note that a send was seen complete, fresh or pending."""
        record = self.pending.get(slot)
        if record is not None and record.handle is handle:
            self.complete(record, now)
            return
        for place, (_, fresh, posted) in enumerate(self.fresh):
            if fresh is handle:
                del self.fresh[place]
                self.counters.posts += 1
                self.count_completion(posted, now)
                return

    def count_completion(self, posted: float, now: float) -> None:
        """Count a send that was posted then and is complete now."""
        took = now - posted
        self.counters.completions += 1
        self.took.count(took)
        self.counters.parked_s += took
        self.counters.parked_max_s = max(self.counters.parked_max_s, took)

    def is_left(self, slot: int, handle: Any) -> bool:
        """Whether this handle is upstream's to wait for."""
        return slot in self.left and self.left[slot] is handle

    def displace(self, slot: int) -> None:
        """Let the keeper have the pending send of a slot, if there is one: something else was written there."""
        if (record := self.pending.pop(slot, None)) is not None:
            self.counters.displaced += 1
            self.let_go(record)

    def give_to_keeper(self, slot: int) -> tuple[Any, float] | None:
        """Give the pending send of a slot to the keeper; return it and when it was posted, or None if there is none.

        Needs no lock: who has it may be inside a test for long. One that is fresh still stays here, for its looks.
        """
        # The race that this allows: the lock's holder may be testing this very send, and count it as complete though it
        # was abandoned. Two never test it at once: the keeper does so under the same lock.
        fresh = [(handle, posted) for place, handle, posted in list(self.fresh) if place == slot]
        if (record := self.pending.pop(slot, None)) is not None:  # looked for after `fresh`: that is the way it takes
            self.let_go(record)
            return record.handle, record.posted
        return fresh[-1] if fresh else None

    def let_go(self, record: Pending) -> None:
        """Give a send that nobody waits for to the keeper."""
        KEEPER.keep(Kept(record.handle, record.completion, self.lock))

    def retire(self, handles: Any) -> None:
        """Forget what is in its slot, which is upstream's; the keeper has the rest. The caller holds the lock."""
        self.look_at_fresh(lambda *_: None)
        for record in self.records(None):
            if handles[record.slot] is not record.handle:
                self.let_go(record)
        self.pending.clear()

    def describe(self, now: float) -> dict[str, Any]:
        """Return the counters, and slot and age in seconds of what is pending."""
        known = [(record.slot, record.posted) for record in list(self.pending.values())]
        fresh = [(slot, posted) for slot, _, posted in list(self.fresh)]
        counted = asdict(self.counters)
        counted["posts"] += len(fresh)
        for name in ("posts", "polls", "completions"):
            counted[name] += self.at_once
        pending = [{"slot": slot, "age_s": now - posted} for slot, posted in known + fresh]
        return counted | {"pending": pending, "at_once": self.at_once, "parked_histogram": dict(self.took)}
