"""The progress engine: makes posted sends move, in bounded bursts of tests, and never blocks in MPI.

A rendezvous send moves only while its sender is inside MPI. A *drive* is one bounded burst of tests, which enters MPI
and asks for completion in one call. Its *budget* bounds the burst; driving again while a send is pending is what makes
progress certain. The engine knows requests, not TensorRT-LLM. NVIDIA/TensorRT-LLM#14850 proposed the burst; its
reviewers asked for the lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from trtllm_pp_progress._handles import UnknownShapeError, probe
from trtllm_pp_progress._settings import Settings
from trtllm_pp_progress._table import ABANDONED, Abandoned, HandleTable, Pending, Sends, clear_slot

__all__ = ["Engine"]

logger = logging.getLogger("trtllm_pp_progress")

UNCERTAIN_POLLS = 10_000  # then a handle that may only complete in wait() is left to upstream's wait


class Engine:
    """Drives the pending sends of one executor.

    Every method may be called from any thread. `identify` returns (rank, peer) for messages; `clock` and `pause` are
    seconds and a sleep. The idle wait sets `driver_awake` and `wake_driver`: a send posted while the driver is awake is
    left to it, for a test would only cost the posting thread the GIL; otherwise one test shows whether to wake it.
    """

    def __init__(
        self,
        settings: Settings,
        identify: Callable[[], tuple[Any, Any]] = lambda: (None, None),
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self.tables: dict[str, HandleTable] = {}
        self.abandoned: list[Abandoned] = []
        self.deadline: float | None = None  # set once the executor is closing
        self.driver_awake: Callable[[], bool] = lambda: False
        self.wake_driver: Callable[[], None] = lambda: None
        self._identify, self._clock, self._pause = identify, clock, pause
        self._plain: dict[int, tuple[Any, Sends]] = {}  # by id; the list is kept so that its id stays its own
        self._said: set[str] = set()

    def table(self, name: str, handles: list[Any]) -> HandleTable:
        """Return a handle table that holds `handles` and reports to this engine; it replaces one of the same name."""
        self.tables[name] = table = HandleTable(name, handles, self._posted)
        return table

    @property
    def pending(self) -> bool:
        """Whether any send may be pending."""
        return any(table.sends for table in self.tables.values())

    # Driving

    def progress_pp_send_handles(self, send_handles: Any, microbatch_id: int, max_polls: int | None = None) -> bool:
        """Drive one slot: test its send at most `max_polls` times, and clear the slot as soon as it is complete.

        Returns whether the slot is clear. Never blocks: where another thread is testing this table it leaves at once,
        and an incomplete send is no error. A handle that cannot be tested, or that raised, stays in its slot for
        upstream's own wait. `max_polls` defaults to the setting; ValueError below 1.
        """
        budget = self.settings.max_polls if max_polls is None else max_polls
        if not budget >= 1:
            raise ValueError(f"max_polls={max_polls!r} is not valid: at least 1")
        handle = send_handles[microbatch_id]
        if handle is None:
            return True
        sends = self._sends(send_handles)
        if not isinstance(send_handles, HandleTable) and microbatch_id not in sends.pending:
            sends.fresh.append((microbatch_id, handle, self._clock()))  # a plain list does not report what is posted
        self._drive(send_handles, sends, budget, microbatch_id)
        return send_handles[microbatch_id] is None

    def drive(self) -> bool:
        """Drive every pending send of every table, one budget a table; true when none is left."""
        for table in self.tables.values():
            if table.sends:
                self._drive(table, table.sends, self.settings.max_polls)
        return not self.pending

    def _drive(self, handles: Any, sends: Sends, budget: int, only: int | None = None) -> None:
        if not sends.lock.acquire(blocking=False):
            sends.counters.busy += 1
            return
        try:
            self._look_at_fresh(sends)
            slots = list(sends.pending) if only is None else [only]
            polls = 0
            while polls < budget and (slots := [slot for slot in slots if slot in sends.pending]):
                for slot in slots[: budget - polls]:
                    polls += 1
                    self._test(handles, sends, slot, sends.pending[slot])
            sends.counters.drives += 1
            left = [sends.pending[slot] for slot in slots if slot in sends.pending]
            sends.counters.exhausted += bool(left)
            for record in left:
                self._warn_stalled(sends, record)
        finally:
            sends.lock.release()

    def _look_at_fresh(self, sends: Sends) -> None:
        while sends.fresh:
            slot, handle, posted = sends.fresh.pop(0)
            sends.counters.posts += 1
            try:
                sends.pending[slot] = Pending(slot, handle, probe(handle), posted, posted)
            except UnknownShapeError as error:
                self._leave(sends, slot, error)

    def _leave(self, sends: Sends, slot: int, error: Exception) -> None:
        """Leave a slot to upstream's own wait, which expects what it will meet."""
        unknown = isinstance(error, UnknownShapeError)
        sends.counters.unknown += unknown
        sends.counters.failed += not unknown
        sends.left.add(slot)  # before it leaves `pending`: wait() relies on this order
        sends.pending.pop(slot, None)
        key = f"{error}" if unknown else f"{sends.name}[{slot}] {error}"
        if key not in self._said:
            self._said.add(key)
            logger.warning("rank %s: %s[%d] is left to upstream's own wait: %r", self._identify()[0], sends.name, slot, error)

    def _test(self, handles: Any, sends: Sends, slot: int, record: Pending) -> None:
        counters = sends.counters
        counters.polls += 1
        record.polls += 1
        try:
            if record.probe.done():
                parked = self._clock() - record.posted
                counters.completions += 1
                counters.parked_s += parked
                counters.parked_max_s = max(counters.parked_max_s, parked)
                if handles[slot] is record.handle:
                    clear_slot(handles, slot)
                sends.pending.pop(slot, None)
            elif not record.probe.certain and record.polls >= UNCERTAIN_POLLS:
                raise UnknownShapeError(f"{type(record.handle).__qualname__}: polling does not complete it, the backend needs wait()")
        except Exception as error:
            self._leave(sends, slot, error)

    def _posted(self, table: HandleTable, slot: int, handle: Any) -> None:
        # Upstream's executor thread passes here on its critical path, so the common case, eager and complete, is short.
        sends = table.sends
        if not self.driver_awake():
            try:
                complete = handle.test()[0] is True
            except Exception:
                complete = False  # whatever it is, the drive below meets it again and says so
            if complete:
                sends.counters.posts += 1
                sends.counters.completions += 1
                clear_slot(table, slot)
                return
        sends.fresh.append((slot, handle, self._clock()))
        if not self.driver_awake():
            self.wake_driver()

    # Waiting

    def wait(self, send_handles: Any, microbatch_id: int, upstream_wait: Callable[[], Any]) -> None:
        """Return once a slot is clear, as upstream's wait_on_pp_send_handles does, but without blocking inside MPI.

        Waits as long as it takes, with a warning every `stall_warning_s`; once the executor is closing, no longer than
        the deadline, and then abandons the send. A handle that cannot be tested gets `upstream_wait`; what that raises
        is raised, or logged and dropped while closing.
        """
        sends = self._sends(send_handles)
        pauses = self.backoff()
        while not self.progress_pp_send_handles(send_handles, microbatch_id):
            if microbatch_id in sends.left:
                self._wait_upstream(send_handles, sends, microbatch_id, upstream_wait)
                return
            if self.deadline is not None and self._clock() >= self.deadline:
                self._abandon(send_handles, sends, microbatch_id)
                return
            self._pause(next(pauses))

    def close(self) -> float:
        """Begin the end: from now on every wait ends at one deadline, which is returned (seconds, of `clock`)."""
        if self.deadline is None:
            self.deadline = self._clock() + self.settings.drain_deadline_s
        return self.deadline

    def drain(self) -> bool:
        """Drive until no send is pending or the deadline of close() has passed; what is left then is abandoned."""
        deadline = self.close()
        pauses = self.backoff()
        while not self.drive():
            if self._clock() >= deadline:
                for table in self.tables.values():
                    for slot in {*table.sends.pending, *(slot for slot, _, _ in table.sends.fresh)}:
                        self._abandon(table, table.sends, slot)
                return False
            self._pause(next(pauses))
        return True

    def backoff(self) -> Iterator[float]:
        """Yield the pauses between drives, in seconds: from backoff_min_us, doubling up to backoff_max_us."""
        pause = self.settings.backoff_min_us
        while True:
            yield pause * 1e-6
            pause = min(2 * pause, self.settings.backoff_max_us)

    def _wait_upstream(self, handles: Any, sends: Sends, slot: int, upstream_wait: Callable[[], Any]) -> None:
        try:
            upstream_wait()
        except Exception as error:
            if self.deadline is None:
                raise
            logger.error("rank %s: %s[%d] failed while closing, dropped: %r", self._identify()[0], sends.name, slot, error)
            clear_slot(handles, slot)
            sends.left.discard(slot)

    def _abandon(self, handles: Any, sends: Sends, slot: int) -> None:
        with sends.lock:  # bounded: a drive holds it no longer than its budget
            self._look_at_fresh(sends)
            if (record := sends.pending.get(slot)) is None:
                return
            kept = Abandoned(sends.name, slot, *self._identify(), self._clock() - record.posted, record.handle)
            ABANDONED.append(kept)
            self.abandoned.append(kept)
            sends.counters.abandoned += 1
            clear_slot(handles, slot)
            sends.pending.pop(slot)
        told = (kept.rank, sends.name, slot, kept.peer, kept.age_s)
        logger.error("rank %s: abandoned the send in %s[%d] to rank %s after %.1f s (request and buffer are kept)", *told)

    # Telling

    def status(self) -> dict[str, Any]:
        """Return the counters of each table, its pending sends (slot, age in seconds) and the abandoned ones."""
        now = self._clock()
        tables = {name: table.sends.describe(now) for name, table in self.tables.items()}
        return {"tables": tables, "abandoned": [kept.describe() for kept in self.abandoned]}

    def _warn_stalled(self, sends: Sends, record: Pending) -> None:
        now = self._clock()
        if now - record.warned >= self.settings.stall_warning_s:
            record.warned = now
            sends.counters.stalls += 1
            rank, peer = self._identify()
            told = (rank, sends.name, record.slot, peer, now - record.posted)
            logger.warning("rank %s: the send in %s[%d] to rank %s is pending for %.1f s", *told)

    def _sends(self, handles: Any) -> Sends:
        if isinstance(handles, HandleTable):
            return handles.sends
        return self._plain.setdefault(id(handles), (handles, Sends("send_handles")))[1]
