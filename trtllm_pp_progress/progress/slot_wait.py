"""The wait for one slot, in the place of upstream's blocking wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_pp_progress.mpi import facts
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.keeper import KEEPER, Kept
from trtllm_pp_progress.progress.sends import Sends
from trtllm_pp_progress.progress.table import clear_slot
from trtllm_pp_progress.progress.waits import bounded

__all__ = ["LOCK_S", "begin_end", "wait_for_slot"]

LOCK_S = 2.0  # a test takes microseconds; one that lasts longer is stuck, and others go on
LAST_S = 0.1  # the same, beyond the deadline, for all slots together


def begin_end(engine: Engine) -> None:
    """Give the waits of an executor that ends their deadline, unless nobody would drive what that abandons."""
    if KEEPER.drives:
        engine.close()


def wait_for_slot(engine: Engine, handles: Any, microbatch_id: int, upstream_wait: Callable[[], Any]) -> None:
    """Return once a slot is clear, as upstream's wait_on_pp_send_handles does, but without blocking inside MPI.

    Waits as long as it takes, with a warning every `stall_warning_s`; once the executor is closing, no longer than the
    deadline, and then abandons the send. A handle that cannot be tested gets `upstream_wait`, which leaves the slot to
    us; what it raises is raised, or logged and dropped while closing. Once MPI is finalized nothing is waited for.
    """
    slot = range(len(handles))[microbatch_id]  # -1 is the last
    _SlotWait(engine, handles, engine.sends_of(handles), slot, upstream_wait).run()


@dataclass(frozen=True)
class _SlotWait:
    engine: Engine
    handles: Any
    sends: Sends
    slot: int
    upstream_wait: Callable[[], Any]

    def run(self) -> None:
        engine, handles, slot = self.engine, self.handles, self.slot
        ends = lambda: math.inf if engine.deadline is None else engine.deadline  # noqa: E731
        if self._is_vain() or not engine.wait_until(self._settled, ends):
            self._abandon()
        left = handles[slot] is not None and engine.is_upstreams(handles, slot)
        if left and facts.state() is not facts.State.FINALIZED:
            self._wait_upstream()

    def _settled(self) -> bool:
        engine, handles, slot = self.engine, self.handles, self.slot
        return engine.settle(handles, slot) or engine.is_upstreams(handles, slot)

    def _is_vain(self) -> bool:
        """Whether the deadline is over and a test is slow: whoever has many slots to wait for cannot look at each."""
        engine = self.engine
        if engine.deadline is None or engine.clock() < engine.deadline:
            return False
        return engine.burst.is_slow(self.handles[self.slot])

    def _locked(self) -> bool:
        """Take the table's lock, unless a test is stuck; once the executor is closing its deadline holds here, too."""
        engine, patience_s = self.engine, LOCK_S
        if engine.deadline is not None:
            patience_s = min(patience_s, max(0.0, engine.deadline + LAST_S - engine.clock()))
        return self.sends.lock.acquire(timeout=patience_s)

    def _wait_upstream(self) -> None:
        engine, handles, sends, slot = self.engine, self.handles, self.sends, self.slot
        if self._locked():  # retired a moment ago, another thread may be inside its last test
            sends.lock.release()
        handle = handles[slot]
        try:
            if engine.deadline is None or engine.retired or not facts.thread_multiple():
                self.upstream_wait()
            elif self._is_vain() or not bounded(self.upstream_wait, engine.deadline - engine.clock()):
                self._lose(handle)
                engine.give_up(sends, slot, engine.clock())
            if handles[slot] is handle:
                handles[slot] = None
        except Exception as error:
            if engine.deadline is None:
                raise
            engine.log.dropped(sends.name, slot, error)
            self._lose(handles[slot])

    def _lose(self, handle: Any) -> None:
        """Empty the slot of a handle that nobody can test: other parts of it may be in flight, so it stays alive."""
        if handle is not None:
            KEEPER.keep(Kept(handle, None))
        clear_slot(self.handles, self.slot)
        self.sends.left.pop(self.slot, None)

    def _abandon(self) -> None:
        """End the wait, unless the send turns out to be complete; the keeper drives it from now on."""
        handles, sends, slot = self.handles, self.sends, self.slot
        locked = self._locked()  # or a test is slow or stuck: this wait ends all the same
        try:
            if locked:
                self._look_once_more()
            if (given := sends.give_to_keeper(slot)) is None:
                return
            handle, posted = given
            if handles[slot] is handle:
                clear_slot(handles, slot)
        finally:
            if locked:
                sends.lock.release()
        self.engine.give_up(sends, slot, posted)

    def _look_once_more(self) -> None:
        self.sends.look_at_fresh(self.engine.leave)
        if (record := self.sends.pending.get(self.slot)) is not None and not self._is_vain():
            # The last of at least two: see open-mpi/ompi#8904.
            self.engine.burst.run(self.handles, self.sends, [record], 1)
