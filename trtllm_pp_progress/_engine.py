"""The progress engine: makes posted sends move, in bounded bursts of tests, and never blocks in MPI.

A rendezvous send moves only while its sender is inside MPI. A *drive* is one burst of tests, each of which enters MPI.
Its *budget* bounds it, and driving again while a send is pending is what makes progress certain. The engine knows
requests, not TensorRT-LLM. NVIDIA/TensorRT-LLM#14850: the burst, and the lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress._handles import UnknownShapeError, complete_now
from trtllm_pp_progress._messages import Messages
from trtllm_pp_progress._settings import Settings
from trtllm_pp_progress._standby import Standby
from trtllm_pp_progress._table import ABANDONED, Abandoned, HandleTable, Pending, Sends, clear_slot

__all__ = ["Engine"]

UNCERTAIN_POLLS = 10_000  # then a handle that may only complete in wait() is left to upstream's wait


class Engine:
    """Drives the pending sends of one executor; every method may be called from any thread.

    `identify` returns (rank, peer) for messages; `clock` and `pause` are seconds and a sleep. The idle wait sets how
    often the thread that posts a send tests it, and what to call if that is not enough. `standby` drives in silences.
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
        self.retired = False
        self.tests_at_post: Callable[[], int] = lambda: 0
        self.wake_driver: Callable[[], None] = lambda: None
        self.standby = Standby()
        self.say, self.clock, self._pause = Messages(identify), clock, pause
        self._plain: dict[int, tuple[Any, Sends]] = {}  # by id; the list is kept so that its id stays its own

    def table(self, name: str, handles: list[Any]) -> HandleTable:
        """Return a handle table that holds `handles` and reports to this engine; it replaces one of the same name."""
        self.tables[name] = table = HandleTable(name, handles, self._posted)
        return table

    @property
    def pending(self) -> bool:
        """Whether any send may be pending."""
        for table in () if self.retired else list(self.tables.values()):
            if table.sends.fresh or table.sends.pending:
                return True
        return False

    # Driving

    def progress_pp_send_handles(self, send_handles: Any, microbatch_id: int, max_polls: int | None = None) -> bool:
        """Drive one slot: test its send at most `max_polls` times, and clear the slot as soon as it is complete.

        Returns whether the slot is clear. Never blocks: where another thread is testing this table it leaves at once.
        A handle that cannot be tested, or that raised, stays in its slot for upstream's own wait. `max_polls` defaults
        to the setting; ValueError for anything but a whole number from 1.
        """
        budget = self.settings.max_polls if max_polls is None else max_polls
        if not isinstance(budget, int) or budget < 1:
            raise ValueError(f"max_polls={max_polls!r} is not valid: a whole number, at least 1")
        if send_handles[microbatch_id] is not None:  # -1 is the last
            self._drive(send_handles, self._sends(send_handles), budget, range(len(send_handles))[microbatch_id])
        return send_handles[microbatch_id] is None

    def drive(self, once: bool = False) -> bool:
        """Drive every pending send of every table, one budget a table or `once` each; true when none is left."""
        for table in list(self.tables.values()):
            if known := len(table.sends):
                self._drive(table, table.sends, known if once else self.settings.max_polls)
        return not self.pending

    def _drive(self, handles: Any, sends: Sends, budget: int, only: int | None = None) -> None:
        if not sends.lock.acquire(blocking=False):
            sends.counters.busy += 1
            return
        try:
            if self.retired:
                return
            if only is not None and not isinstance(handles, HandleTable):
                sends.discover(only, handles[only], self.clock())
            sends.look_at_fresh(self._leave)
            records, polls = sends.records(only), 0
            while polls < budget and records:
                for record in records[: budget - polls]:
                    polls += 1
                    self._test(handles, sends, record)
                if records := [record for record in records if sends.pending.get(record.slot) is record]:
                    self.standby.arm()
            sends.counters.drives += 1
            sends.counters.exhausted += bool(records)
            for record in records:
                self._warn_stalled(sends, record)
        finally:
            sends.lock.release()

    def _leave(self, sends: Sends, slot: int, handle: Any, error: Exception) -> None:
        """Leave a slot to upstream's own wait, which expects what it will meet."""
        unknown = isinstance(error, UnknownShapeError)
        sends.counters.unknown += unknown
        sends.counters.failed += not unknown
        sends.left[slot] = handle
        sends.pending.pop(slot, None)
        self.say.left(sends.name, slot, error, once_for=f"{error}" if unknown else f"{sends.name}[{slot}] {error}")

    def _test(self, handles: Any, sends: Sends, record: Pending) -> None:
        sends.counters.polls += 1
        record.polls += 1
        try:
            if record.probe.done():
                sends.complete(record, self.clock())  # before the slot is clear, for then others write to it
                if handles[record.slot] is record.handle:
                    clear_slot(handles, record.slot)
            elif not record.probe.certain and record.polls >= UNCERTAIN_POLLS:
                raise UnknownShapeError(f"{type(record.handle).__qualname__}: polls do not complete it, wait() may")
        except Exception as error:
            self._leave(sends, record.slot, record.handle, error)

    def _posted(self, table: HandleTable, slot: int, handle: Any, error: Exception | None) -> None:
        # Upstream's critical path, so this waits for no lock.
        sends, posted = table.sends, self.clock()
        if error is None and (most := self.tests_at_post()) and sends.lock.acquire(blocking=False):
            try:
                while most and not self.retired:
                    most -= 1
                    sends.counters.polls += 1
                    if complete_now(handle):
                        sends.counters.posts += 1
                        sends.count_completion(posted, self.clock())
                        clear_slot(table, slot)
                        return
                    self.standby.arm()
            except (AttributeError, TypeError):
                pass  # another shape, which a drive finds out
            except Exception as raised:
                error = raised
            finally:
                sends.lock.release()
        if error is not None:  # not to be tested again: some requests raise once, then answer yes
            sends.counters.posts += 1
            self._leave(sends, slot, handle, error)
        elif not self.retired:
            sends.fresh.append((slot, handle, posted))
            self.wake_driver()

    # Waiting

    def wait(self, send_handles: Any, microbatch_id: int, upstream_wait: Callable[[], Any]) -> None:
        """Return once a slot is clear, as upstream's wait_on_pp_send_handles does, but without blocking inside MPI.

        Waits as long as it takes, with a warning every `stall_warning_s`; once the executor is closing, no longer than
        the deadline, and then abandons the send. A handle that cannot be tested gets `upstream_wait`; what that raises
        is raised, or logged and dropped while closing.
        """
        sends, slot = self._sends(send_handles), range(len(send_handles))[microbatch_id]
        pauses = self.settings.backoff()
        while not self.progress_pp_send_handles(send_handles, slot):
            if over := self.deadline is not None and self.clock() >= self.deadline:
                self._abandon(send_handles, sends, slot)
            if self.retired or sends.is_left(slot, send_handles[slot]):
                self._wait_upstream(send_handles, sends, slot, upstream_wait)
                return
            if over:
                return
            self._pause(next(pauses))

    def close(self) -> float:
        """Begin the end: from now on every wait ends at one deadline, which is returned (seconds, of `clock`)."""
        if self.deadline is None:
            self.deadline = self.clock() + self.settings.drain_deadline_s
        return self.deadline

    def drain(self) -> bool:
        """Drive until no send is pending or the deadline of close() has passed; what is left then is abandoned."""
        deadline, pauses = self.close(), self.settings.backoff()
        while not self.drive():
            if self.clock() >= deadline:
                for table in list(self.tables.values()):
                    for slot in {*table.sends.pending, *(slot for slot, _, _ in table.sends.fresh)}:
                        self._abandon(table, table.sends, slot)
                return False
            self._pause(next(pauses))
        return True

    def retire(self) -> None:
        """Leave every send to upstream from now on; returns once no thread is testing one."""
        self.retired = True
        self.standby.stop()
        for sends in [table.sends for table in list(self.tables.values())] + [s for _, s in list(self._plain.values())]:
            with sends.lock:
                sends.fresh.clear()
                sends.pending.clear()

    def _wait_upstream(self, handles: Any, sends: Sends, slot: int, upstream_wait: Callable[[], Any]) -> None:
        with sends.lock:
            pass  # retired a moment ago: another thread may still be inside its last test
        try:
            upstream_wait()
        except Exception as error:
            if self.deadline is None:
                raise
            self.say.dropped(sends.name, slot, error)
            clear_slot(handles, slot)
            sends.left.pop(slot, None)

    def _abandon(self, handles: Any, sends: Sends, slot: int) -> None:
        with sends.lock:  # bounded: a drive holds it no longer than its budget
            sends.look_at_fresh(self._leave)
            if (record := sends.pending.get(slot)) is not None:
                self._test(handles, sends, record)  # the last of at least two: see open-mpi/ompi#8904
            if record is None or sends.pending.get(slot) is not record:
                return
            kept = Abandoned(sends.name, slot, *self.say.identify(), self.clock() - record.posted, record.handle)
            ABANDONED.append(kept)
            self.abandoned.append(kept)
            sends.counters.abandoned += 1
            sends.pending.pop(slot, None)
            if handles[slot] is record.handle:
                clear_slot(handles, slot)
        self.say.abandoned(kept)

    def status(self) -> dict[str, Any]:
        """Return the counters of each table, its pending sends (slot, age in seconds) and the abandoned ones."""
        tables = {name: table.sends.describe(self.clock()) for name, table in list(self.tables.items())}
        return {"driver": self.standby.status(), "tables": tables, "abandoned": [a.describe() for a in self.abandoned]}

    def _warn_stalled(self, sends: Sends, record: Pending) -> None:
        if (now := self.clock()) - record.warned >= self.settings.stall_warning_s:
            record.warned = now
            sends.counters.stalls += 1
            self.say.stalled(sends.name, record.slot, now - record.posted)

    def _sends(self, handles: Any) -> Sends:
        if isinstance(handles, HandleTable):
            return handles.sends
        return self._plain.setdefault(id(handles), (handles, Sends("send_handles")))[1]
