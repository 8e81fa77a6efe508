"""The handle table: a list that knows which of its slots hold a pending send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from trtllm_pp_progress._handles import Probe, UnknownShapeError, probe

__all__ = ["ABANDONED", "Abandoned", "Counters", "HandleTable", "Pending", "Sends", "clear_slot"]


@dataclass
class Counters:
    """What happened in one table; fields only grow. Times are in seconds, from posted to seen complete."""

    posts: int = 0
    completions: int = 0
    drives: int = 0
    polls: int = 0
    exhausted: int = 0  # drives that spent their budget with a send still pending
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
    probe: Probe
    posted: float
    warned: float
    polls: int = 0


@dataclass(eq=False)
class Sends:
    """What is known of the sends of one table.

    `fresh` holds what was posted and not looked at yet, `pending` what is known not to be complete, by slot: looking
    for work costs nothing for empty slots (upstream keeps 1,024). `left` has the handles, by slot, that cannot be
    tested or have failed, which are upstream's to wait for. `lock` belongs to the one thread that may test or wait: two
    threads in one request at once is erroneous (MPI 4.1, section 11.6). `displaced` keeps pending sends alive that
    somebody overwrote: their buffers are still in use. `at_once` counts sends that were complete at their first test.
    """

    name: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: Counters = field(default_factory=Counters)
    fresh: list[tuple[int, Any, float]] = field(default_factory=list)
    pending: dict[int, Pending] = field(default_factory=dict)
    left: dict[int, Any] = field(default_factory=dict)
    at_once: int = 0
    displaced: list[Pending] = field(default_factory=list)

    def __len__(self) -> int:
        """How many sends may be pending."""
        return len(self.fresh) + len(self.pending)

    def discover(self, slot: int, handle: Any, now: float) -> None:
        """Note what is in a slot of a plain list, which does not report what is written to it."""
        if handle is not None and slot not in self.pending and not self.is_left(slot, handle):
            self.fresh.append((slot, handle, now))

    def look_at_fresh(self, refuse: Callable[[Sends, int, Any, Exception], object]) -> None:
        """Move what is fresh to what is pending; `refuse(self, slot, handle, why)` is called for what has no test."""
        while self.fresh:
            slot, handle, posted = self.fresh.pop(0)
            self.counters.posts += 1
            try:
                asked = probe(handle)
            except UnknownShapeError as error:
                refuse(self, slot, handle, error)
            else:
                self.displace(slot)  # overwritten before anybody looked
                self.left.pop(slot, None)
                self.pending[slot] = Pending(slot, handle, asked, posted, posted)

    def records(self, only: int | None) -> list[Pending]:
        """Return what is pending, in one slot or in all; others may write to slots while these are tested."""
        records = list(self.pending.values()) if only is None else [self.pending.get(only)]
        return [record for record in records if record is not None]

    def complete(self, record: Pending, now: float) -> None:
        """Note that a pending send was seen complete."""
        self.pending.pop(record.slot, None)
        self.count_completion(record.posted, now)

    def count_completion(self, posted: float, now: float) -> None:
        """Count a send that was posted then and is complete now."""
        parked = now - posted
        self.counters.completions += 1
        self.counters.parked_s += parked
        self.counters.parked_max_s = max(self.counters.parked_max_s, parked)

    def is_left(self, slot: int, handle: Any) -> bool:
        """Whether this handle is upstream's to wait for."""
        return slot in self.left and self.left[slot] is handle

    def displace(self, slot: int) -> None:
        """Keep the pending send of a slot alive, if there is one, although something else was written there."""
        if (record := self.pending.pop(slot, None)) is not None:
            self.displaced.append(record)
            self.counters.displaced += 1

    def describe(self, now: float) -> dict[str, Any]:
        """Return the counters, and slot and age in seconds of what is pending."""
        known = [(record.slot, record.posted) for record in list(self.pending.values())]
        fresh = [(slot, posted) for slot, _, posted in list(self.fresh)]
        counted = asdict(self.counters)
        counted["posts"] += len(fresh)
        for name in ("posts", "polls", "completions"):
            counted[name] += self.at_once
        return counted | {"pending": [{"slot": slot, "age_s": now - posted} for slot, posted in known + fresh]}


@dataclass(frozen=True, eq=False)
class Abandoned:
    """A send given up at a deadline: kept alive, never cancelled or freed (open-mpi/ompi#9626)."""

    table: str
    slot: int
    rank: Any
    peer: Any
    age_s: float
    handle: Any

    def describe(self) -> dict[str, Any]:
        """Return everything but the handle."""
        return {name: value for name, value in vars(self).items() if name != "handle"}


ABANDONED: list[Abandoned] = []  # for the life of the process: MPI may still read these buffers


class HandleTable(list[Any]):
    """Upstream's list of send handles, one per microbatch slot, which reports what is written to it.

    It stays a list: indexing, tests for None and loops mean what they meant. A pkl5 request is tested once as it is
    written, before anybody else can see it: most sends of an executor thread are small and complete at once, and leave
    nothing to do but to count them. `posted(table, slot, handle, error)` is called after any other handle was written;
    `error` is what that test raised, or None.
    """

    def __init__(
        self, name: str, handles: Iterable[Any], posted: Callable[[HandleTable, int, Any, Exception | None], None]
    ) -> None:
        super().__init__(handles)
        self.sends = Sends(name)
        self._posted = posted
        for slot, handle in enumerate(self):
            if handle is not None:
                posted(self, slot, handle, None)

    def __setitem__(self, index: Any, value: Any) -> None:
        # Upstream's critical path, in the middle of a step: with cold caches each Python call more takes 4 us there.
        if isinstance(index, slice):
            self._set_slice(index, value)
            return
        sends, error = self.sends, None
        if isinstance(value, tuple):
            try:
                for part in value:
                    if part.Test() is not True:
                        break
                else:
                    list.__setitem__(self, index, None)
                    sends.at_once += 1
                    if sends.left or sends.pending:
                        self._overwritten(index, value)
                    return
            except AttributeError:
                pass  # another shape
            except Exception as raised:
                error = raised
            except BaseException:
                list.__setitem__(self, index, value)  # whatever ends this thread: the buffers are in use
                raise
        list.__setitem__(self, index, value)
        if sends.left or sends.pending:
            self._overwritten(index, value)
        if value is not None:
            self._posted(self, index if index >= 0 else index + len(self), value, error)

    def _set_slice(self, index: slice, value: Any) -> None:
        slots, values = range(*index.indices(len(self))), list(value)
        if len(slots) != len(values):
            raise ValueError(f"{len(values)} handles for {len(slots)} slots: a handle table keeps its length")
        for slot, handle in zip(slots, values, strict=True):
            self[slot] = handle

    def _overwritten(self, index: int, value: Any) -> None:
        slot = range(len(self))[index]
        self.sends.left.pop(slot, None)
        if value is None:
            self.sends.pending.pop(slot, None)  # upstream has waited
        else:
            self.sends.displace(slot)


def clear_slot(handles: Any, slot: int) -> None:
    """Empty a slot, of a handle table without the bookkeeping of an assignment."""
    list.__setitem__(handles, slot, None)
