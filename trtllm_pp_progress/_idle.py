"""The idle wait: a queue whose blocking get() drives pending sends, and sleeps without waking when there are none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from trtllm_pp_progress._engine import Engine

__all__ = ["ProgressQueue"]

GRACE_S = 0.002


class ProgressQueue(queue.Queue[Any]):
    """The relay thread's queue: upstream's `get()` becomes the progress engine's turn.

    While a send is pending, a blocking get() without a timeout alternates between a drive and a short wait for the next
    batch, backing off; once all are complete the back-off starts anew. With a batch in hand each pending send is tested
    once. While none is pending it is a plain blocking get: no MPI call and no timed wake-up. A send that another thread
    posts wakes it, but is given `GRACE_S` before the first drive: that thread is about to enter MPI itself, as a rule.
    Any other get() is queue.Queue's.

    None, upstream's order to leave the loop, is handed out once the pending sends are drained (`Engine.drain`, bounded
    by its deadline): eras B to D free the communicator right after.
    """

    def __init__(
        self,
        engine: Engine,
        maxsize: int = 0,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        super().__init__(maxsize)
        self._engine, self._wait = engine, wait
        self._asleep = True
        self.consumer: int | None = None  # ident of the thread that gets: the relay thread
        self.timed_waits = 0
        engine.tests_at_post, engine.wake_driver = self._tests_at_post, self._wake

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item, driving pending sends while there is none."""
        if not block or timeout is not None:
            return super().get(block, timeout)
        self.consumer, self._asleep = threading.get_ident(), False
        engine, standby = self._engine, self._engine.standby
        pauses: Iterator[float] | None = None
        if drove := engine.pending and self.empty():
            engine.drive()
        while True:
            with self.mutex:
                if not self._qsize():
                    self._asleep = True  # before asking for pending sends, so that a post in between wakes us
                    if engine.pending:
                        self._asleep = False
                        pauses = pauses or engine.settings.backoff()
                        self._pause(next(pauses))
                    else:
                        standby.rest(lambda: engine.pending)
                        self._wait(self.not_empty, None)
                        self._asleep = False
                        if not self._qsize():
                            pauses = chain([GRACE_S], engine.settings.backoff())
                            continue
                if self._qsize():
                    item = self._get()
                    self.not_full.notify()
                    break
            drove = True
            if engine.drive():
                pauses = None
        if item is None:
            engine.drain()
            standby.stop()
        elif drove or engine.pending:
            engine.drive(once=True)  # what is complete is to be known, or the standby would act for nothing
            standby.rest(lambda: engine.pending, receiving=True)
        return item

    def _pause(self, pause: float) -> None:
        clock, standby = self._engine.clock, self._engine.standby
        standby.arm()
        self.timed_waits += 1
        started = clock()
        self._wait(self.not_empty, pause)
        standby.overslept(clock() - started - pause)

    def _tests_at_post(self) -> int:
        # The relay thread's own send: at once, for the way back to get() takes as long as the first answer does.
        # Those of others are on upstream's critical path: the table has tested them once, and the relay sees to them.
        return self._engine.settings.max_polls if threading.get_ident() == self.consumer else 0

    def _wake(self) -> None:
        self._engine.standby.arm()
        if self._asleep:
            with self.mutex:
                self.not_empty.notify()
