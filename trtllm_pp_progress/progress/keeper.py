"""The keeper: sends that nobody waits for any more stay alive, and are driven until they are complete.

To abandon a send ends the wait for it, not the send: MPI may still read its buffer, and a receiver that comes late is
to find it. The same holds for a send whose slot was overwritten and for those of an executor that is gone.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from trtllm_pp_progress.driver.choose import Driver
from trtllm_pp_progress.mpi import facts
from trtllm_pp_progress.progress.handles import Completion

__all__ = ["KEEPER", "Abandoned", "Keeper", "Kept"]

PERIOD_S = 0.02  # between two looks
PATIENT_PERIOD_S = 0.05  # once nothing was complete for PATIENCE looks
PATIENCE = 100
TESTS = 32  # a look: a send that begins to move takes several


@dataclass(frozen=True, eq=False)
class Abandoned:
    """A send whose wait ended at a deadline: never cancelled or freed (open-mpi/ompi#9626)."""

    table: str
    slot: int
    rank: Any
    peer: Any
    age_s: float

    def describe(self) -> dict[str, Any]:
        """Return it in plain values."""
        return dict(vars(self))


@dataclass(eq=False)
class Kept:
    """A send to keep: its handle, what tests it, and the lock of the one thread that may."""

    handle: Any
    completion: Completion | None  # None: it cannot be tested, or a test raised; it is only kept alive
    lock: threading.Lock = field(default_factory=threading.Lock)


class Keeper:
    """Keeps sends for the life of the process: a thread of its own drives them, and sleeps while there are none.

    `keep()` may be called from anywhere, a garbage collection included. Where a native driver can run it steps in while
    the thread is kept from the GIL. Once `stop()` was called, or MPI is finalized, sends stay alive and are left alone.
    """

    def __init__(self) -> None:
        self._clear()
        os.register_at_fork(after_in_child=self._clear)

    def _clear(self) -> None:
        self.sends: list[Kept] = []
        self._inbox: SimpleQueue[Kept | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._driver = Driver()
        self._crowded = False
        self._patience_s = 0.0

    def start(self, mode: str, crowded: bool, patience_s: float = 0.0) -> None:
        """Be ready for sends; not from a garbage collection, which may hold what starting a thread needs.

        `patience_s` is how long finish() may take: the longest that was ever asked for holds.
        """
        self._patience_s = max(self._patience_s, patience_s)
        if self._thread is None and not self._stopped:
            self._driver = Driver(mode)
            self._crowded = crowded
            self._thread = threading.Thread(target=self._run, name="pp-keeper", daemon=True)
            self._thread.start()

    @property
    def drives(self) -> bool:
        """Whether what it gets is driven: its thread was started, and may enter MPI beside upstream's."""
        return self._thread is not None and facts.thread_multiple()

    def keep(self, kept: Kept) -> None:
        """Keep a send that its owner has let go of; after stop() a native driver has it, where one can run."""
        self.sends.append(kept)  # at once: whoever asks right after this is to find it
        self._inbox.put(kept)
        if self._stopped and not facts.ended:
            self._take(kept)
            if kept.completion is not None:
                self._driver.arm()

    def finish(self) -> None:
        """Wait until nothing is driven any more, at most as long as a cleanup may take.

        Before MPI_Finalize, where that makes no progress: a receiver that comes while its sender is in it gets nothing.
        """
        ends = time.monotonic() + self._patience_s
        while self._driven() and not self._stopped and time.monotonic() < ends:
            time.sleep(PERIOD_S)

    def stop(self, timeout_s: float = 2.0, native: bool = True) -> None:
        """Leave MPI for good, within `timeout_s` seconds; what is kept stays alive.

        Without `native` a native driver goes on, until MPI_Finalize: the interpreter's end is not yet MPI's.
        """
        self._stopped = True
        if native:
            self._driver.stop(timeout_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._inbox.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        looks = 0
        while True:
            period = PERIOD_S if looks < PATIENCE else PATIENT_PERIOD_S
            try:
                kept = self._inbox.get(timeout=period if self._driven() else None)
            except Empty:
                looks += 1
            else:
                if kept is None:
                    return
                self._take(kept)
                del kept  # or it would live until the next one comes
                looks = 0
            if self._stopped or facts.state() is facts.State.FINALIZED:
                return
            if any([self._look(kept) for kept in self._driven()]):
                looks = 0
            self._driver.rest(lambda: bool(self._driven()))
            if self._driven():
                self._driver.arm(period)

    def _driven(self) -> list[Kept]:
        return [kept for kept in self.sends if kept.completion is not None]

    def _take(self, kept: Kept) -> None:
        if not facts.thread_multiple():
            kept.completion = None  # no thread of ours may be in MPI beside upstream's
        if kept.completion is not None:
            self._driver.start(self._crowded)

    def _look(self, kept: Kept) -> bool:
        """Test a send, if nobody else is at it; tell whether it is complete, and let go of it then."""
        if kept.completion is None or not kept.lock.acquire(blocking=False):
            return False
        try:
            done = any(kept.completion.done() for _ in range(TESTS))
        except Exception:
            kept.completion = None  # other parts of it may be in flight
            return False
        finally:
            kept.lock.release()
        if done:
            self.sends.remove(kept)
        return done


KEEPER = Keeper()  # the process's own: executors come and go
