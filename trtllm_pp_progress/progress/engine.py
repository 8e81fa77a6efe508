"""The progress engine: makes posted sends move, in bounded bursts of tests, and never blocks in MPI.

A rendezvous send moves only while its sender is inside MPI. A *drive* is one burst of tests, each of which enters MPI.
Its *budget* and its time bound it, and driving again while a send is pending is what makes progress certain. The engine
knows requests, not TensorRT-LLM. NVIDIA/TensorRT-LLM#14850: the burst, and the lock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.driver.choose import Driver
from trtllm_pp_progress.driver.tester import AS_LONG_AS_IT_TAKES
from trtllm_pp_progress.mpi import facts
from trtllm_pp_progress.progress.burst import DRIVE_S, SLOW_TEST_S, Burst
from trtllm_pp_progress.progress.handles import UnknownShapeError
from trtllm_pp_progress.progress.keeper import Abandoned
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.progress.relay import RelayThread
from trtllm_pp_progress.progress.sends import Sends
from trtllm_pp_progress.progress.table import HandleTable
from trtllm_pp_progress.progress.waits import pauses, wait_until
from trtllm_pp_progress.settings.core import Settings

__all__ = ["Engine"]

SPIN_S = 0.05  # a wait looks without pausing for so long where that costs nobody else, as the blocking wait would
RETIRE_S = 2.0  # a test takes microseconds; one that lasts longer is stuck, and others go on

_numbers = itertools.count()


class Engine:
    """Drives the pending sends of one executor; every method may be called from any thread.

    `log` says what happens; `driver` drives while no Python thread can; `clock` and `pause` are seconds and a sleep.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log | None = None,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.number = next(_numbers)  # its name in metrics, for the life of the process
        self.settings, self.log, self.clock, self._pause = settings, log or Log(), clock, pause
        self.driver = driver or Driver(settings.mode, self.log.silent)
        self.relay = RelayThread()
        self.tables: dict[str, HandleTable] = {}
        self.abandoned: list[Abandoned] = []
        self.deadline: float | None = None  # set while the executor is closing
        self.patience = 1  # how many drain deadlines the end may take
        self.retired = False
        self.off = False  # turned off for a while, to see what driving is worth: waits alone test sends
        self.posting: set[int] = set()  # threads about to post: pending, though no table has their send yet
        self._plain: dict[int, tuple[Any, Sends]] = {}  # by id; the list is kept so that its id stays its own
        self.burst = Burst(clock, settings.stall_warning_s, self.driver, self.log, self.leave)

    def table(self, name: str, handles: list[Any]) -> HandleTable:
        """Return a handle table that holds `handles` and reports to this engine; it replaces one of the same name."""
        if (replaced := self.tables.get(name)) is not None:
            replaced.let_all_go()
        self.tables[name] = table = HandleTable(name, handles, self.posted)
        return table

    def pending(self) -> bool:
        """Tell whether any send may be pending."""
        if self.retired:
            return False
        for table in list(self.tables.values()):
            if table.sends.fresh or table.sends.pending:
                return True
        return bool(self.posting)

    def rest(self, receiving: bool = False) -> None:
        """Let the native driver sleep unless a send is pending; `receiving`: see Driver.rest."""
        self.driver.rest(self.pending, receiving)

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
            self._drive(send_handles, self.sends_of(send_handles), budget, only=range(len(send_handles))[microbatch_id])
        return send_handles[microbatch_id] is None

    def drive(self, once: bool = False, stop: int | None = None) -> bool:
        """Drive every pending send of every table, one budget a table or `once` each; true when none is left.

        A slow test is its last. `stop` is the address of a word that ends a drive as soon as it is not 0.
        """
        ends = self.clock() + SLOW_TEST_S
        for table in list(self.tables.values()):
            if (known := len(table.sends)) and self.clock() < ends:
                self._drive(table, table.sends, known if once else self.settings.max_polls, stop=stop)
        return not self.pending()

    def settle(self, handles: Any, slot: int, rounds: int = AS_LONG_AS_IT_TAKES) -> bool:
        """Drive one slot as a wait does: for up to DRIVE_S where tests take no GIL; tell whether it is clear."""
        ends = self.clock() + SLOW_TEST_S  # then another test would take as long
        done = self.finish(handles, slot, rounds)
        return done or (self.clock() < ends and self.progress_pp_send_handles(handles, slot))

    def finish(self, handles: Any, slot: int, rounds: int = AS_LONG_AS_IT_TAKES) -> bool:
        """Test a slot's send from C, for up to DRIVE_S; tell whether it is complete, False where that cannot be."""
        if self.driver.tester is None or self.retired or type(handles) is not HandleTable:
            return False
        sends = handles.sends
        if facts.ended or not sends.lock.acquire(blocking=False):
            return False
        try:
            return self.burst.finish(handles, sends, slot, rounds, DRIVE_S)
        finally:
            sends.lock.release()

    def _drive(self, handles: Any, sends: Sends, budget: int, only: int | None = None, stop: int | None = None) -> None:
        if not sends.lock.acquire(blocking=False):
            sends.counters.busy += 1
            return
        try:
            if self.retired or facts.state() is facts.State.FINALIZED:
                return
            if only is not None and not isinstance(handles, HandleTable):
                sends.discover(only, handles[only], self.clock())
            sends.look_at_fresh(self.leave)
            records = self.burst.run(handles, sends, sends.records(only), budget, stop)
            sends.counters.drives += 1
            sends.counters.exhausted += bool(records)
        finally:
            sends.lock.release()

    def leave(self, sends: Sends, slot: int, handle: Any, error: Exception) -> None:
        """Leave a slot to upstream's own wait, which expects what it will meet."""
        unknown = isinstance(error, UnknownShapeError)
        sends.counters.unknown += unknown
        sends.counters.failed += not unknown
        sends.left[slot] = handle
        sends.pending.pop(slot, None)
        self.log.left(sends.name, slot, error)

    def posted(self, table: HandleTable, slot: int, handle: Any, error: Exception | None) -> None:
        """Note what was written to a slot of a table; upstream's critical path, so this waits for no lock."""
        sends = table.sends
        if error is not None:  # not to be tested again: some requests raise once, then answer yes
            sends.counters.posts += 1
            self.leave(sends, slot, handle, error)
        elif not self.retired:
            sends.fresh.append((slot, handle, self.clock()))
            if self.off:
                return
            relays = self.relay.thread == threading.get_ident() and not self.relay.out
            # At once: the way back to get(), or to the next call of MPI, takes as long as the first answer does.
            if relays and self.settle(table, slot, self.settings.max_polls):
                return
            if sends.urgent and not (sends.untested or sends.slow):
                if self.finish(table, slot, self.settings.max_polls):
                    return
                sends.in_vain()  # nobody waits for it: the pipeline is full
            # Not before others can see the send: a rest() of theirs would undo it.
            if not self.driver.arm() and not relays:  # else a relay that wakes for nothing contends for the GIL
                self.relay.wake()

    def wait_until(self, done: Callable[[], bool], ends: Callable[[], float]) -> bool:
        """Call `done()` until it is true, with the pauses of the settings; return False once `ends()` has passed."""
        at_once = SPIN_S if self.driver.may_spin else 0.0
        return wait_until(done, pauses(self.settings, self.clock, at_once), self._pause, self.clock, ends)

    def is_upstreams(self, handles: Any, slot: int) -> bool:
        """Whether it is not ours to wait for a slot: its handle is left to upstream, we have retired, or MPI has."""
        left = self.sends_of(handles).is_left(slot, handles[slot])
        return self.retired or left or facts.state() is facts.State.FINALIZED

    def close(self) -> None:
        """Begin the end: every wait ends at one deadline, counted from the last call."""
        self.deadline = self.clock() + self.patience * self.settings.drain_deadline_s

    def reopen(self) -> None:
        """Begin another life: waits have no end again."""
        self.deadline = None

    def turn(self, on: bool) -> None:
        """Stop driving sends that nobody waits for, or begin again with what is pending by now."""
        self.off = not on
        for table in list(self.tables.values()):
            table.sends.off = self.off
        self.driver.turn(on)
        if on and self.pending():
            self.driver.arm()
            self.relay.wake()

    def let_go(self, alone: bool = False) -> None:
        """Give every send that is pending to the keeper: nobody of this executor waits for it any more.

        `alone`, as from a garbage collection, which may run inside any lock: no thread has it, so none is asked for.
        """
        for table in list(self.tables.values()):
            lock = threading.Lock() if alone else table.sends.lock
            if lock.acquire(timeout=RETIRE_S):  # else a test is stuck, and whoever is in it has the sends
                try:
                    table.let_all_go()
                finally:
                    lock.release()
        self.driver.stop(0.0)

    def retire(self, timeout_s: float = RETIRE_S) -> bool:
        """Leave every send to upstream from now on; return whether no thread is testing one any more."""
        self.retired = True
        self.driver.stop(timeout_s)
        idle, ends = True, time.monotonic() + timeout_s
        for handles, sends in [(one, one.sends) for one in list(self.tables.values())] + list(self._plain.values()):
            if sends.lock.acquire(timeout=max(0.0, ends - time.monotonic())):
                sends.retire(handles)
                sends.lock.release()
            else:
                idle = False
        return idle

    def give_up(self, sends: Sends, slot: int, posted: float) -> None:
        """Note that the wait for a send that was posted then has ended at the deadline."""
        rank, peer = self.log.identify()
        given_up = Abandoned(sends.name, slot, rank, peer, self.clock() - posted)
        self.abandoned.append(given_up)
        sends.counters.abandoned += 1
        self.log.abandoned(rank, sends.name, slot, peer, given_up.age_s)

    def status(self) -> dict[str, Any]:
        """Return the counters of each table, its pending sends (slot, age in seconds) and the abandoned ones."""
        seen = {"number": self.number, "rank": self.log.identify()[0], "off": self.off, "driver": self.driver.status()}
        tables = {name: table.sends.describe(self.clock()) for name, table in list(self.tables.items())}
        return {**seen, "tables": tables, "abandoned": [send.describe() for send in list(self.abandoned)]}

    def sends_of(self, handles: Any) -> Sends:
        """Return what is known of the sends of a table, or of a plain list of before the patch."""
        if isinstance(handles, HandleTable):
            return handles.sends
        return self._plain.setdefault(id(handles), (handles, Sends("send_handles")))[1]
