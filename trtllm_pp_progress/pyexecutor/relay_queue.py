"""The relay thread's queue: its blocking get() drives pending sends, and sleeps without waking when there are none."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.waits import pauses

__all__ = ["GRACE_S", "SPIN_S", "RelayQueue"]

GRACE_S = 0.002
SPIN_S = 0.002  # a send that is on its way is tested for so long without a pause, where that costs nobody else


class RelayQueue(queue.Queue[Any]):
    """The queue of executed batches: upstream's `get()` becomes the progress engine's turn.

    While a send is pending, a blocking get() without a timeout alternates between a drive and a short wait for the next
    batch, backing off; once all are complete the back-off starts anew. With a batch in hand each pending send is tested
    once. While none is pending it is a plain blocking get: no MPI call and no timed wake-up. A send that another thread
    posts wakes it where no native driver runs, but is given `GRACE_S` before the first drive: that thread is about to
    enter MPI itself, as a rule. Any other get() is queue.Queue's.

    `inline`: the executor thread relays, this one has nothing to do. Where a native driver runs it stays asleep, for
    it would only contend for the GIL and the locks of those whose sends they are.

    With None, upstream's order to leave the loop, nobody of this executor waits for a send any more: what is pending
    goes to the keeper, and the loop goes on to its end at once, as upstream's does.
    """

    is_shutdown = False  # until Queue.shutdown(), of Python 3.13

    def __init__(
        self,
        engine: Engine,
        maxsize: int = 0,
        inline: bool = False,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        super().__init__(maxsize)
        self._engine, self._inline, self._wait = engine, inline, wait
        self._filled = ctypes.c_int64(0)  # a word that ends a drive in C
        self.timed_waits = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item, driving pending sends while there is none."""
        if not block or timeout is not None:
            return super().get(block, timeout)
        engine, relay = self._engine, self._engine.relay
        relay.comes_by()
        pause_for: Iterator[float] | None = None
        drove = False
        moving = True  # no pause before the first drive; a long test says so, noise included, which saves one pause
        while True:
            with self.mutex:
                if not self._qsize() and not self.is_shutdown:
                    pause_for = self._wait_for_item(pause_for, moving)
                if self._qsize():
                    item = self._get()
                    self.not_full.notify()
                    break
                if self.is_shutdown:
                    raise queue.ShutDown  # type: ignore[attr-defined]
            if pause_for is None or not self._is_driving():  # woken from its sleep: by a post, as a rule
                pause_for, moving = chain([GRACE_S], self._pauses()), False
                continue
            drove = True
            if self._drive():
                pause_for = None
            moving = engine.burst.moved
        self._leave_with(item, drove)
        return item

    def _leave_with(self, item: Any, drove: bool) -> None:
        engine = self._engine
        if item is None:
            engine.let_go()
        elif drove or engine.pending():
            if not (engine.relay.out or engine.off):
                engine.drive(once=True)  # what is complete is to be known, or the native driver would act for nothing
            engine.rest(receiving=True)

    def _wait_for_item(self, pause_for: Iterator[float] | None, moving: bool) -> Iterator[float] | None:
        """Sleep, the lock released: until there is an item or a post, or for the next pause where a send is pending."""
        engine, relay = self._engine, self._engine.relay
        self._filled.value = 0
        relay.falls_asleep(self.not_empty)  # before asking for pending sends, so that a post in between wakes us
        if self._is_driving():
            relay.wakes()
            pause_for = pause_for or self._pauses()
            if not moving and (pause := next(pause_for)):
                self._pause(pause)
            return pause_for
        engine.rest()
        self._wait(self.not_empty, None)
        relay.wakes()
        return None

    def _is_driving(self) -> bool:
        engine = self._engine
        if engine.relay.out or engine.off or (self._inline and engine.driver.native):
            return False
        return engine.pending()

    def _drive(self) -> bool:
        return self._engine.drive(stop=ctypes.addressof(self._filled))

    def _pauses(self) -> Iterator[float]:
        engine = self._engine
        return pauses(engine.settings, engine.clock, SPIN_S if engine.driver.may_spin else 0.0)

    def _pause(self, seconds: float) -> None:
        clock, driver = self._engine.clock, self._engine.driver
        driver.arm(seconds)
        self.timed_waits += 1
        started = clock()
        self._wait(self.not_empty, seconds)
        driver.overslept(clock() - started - seconds)

    def _put(self, item: Any) -> None:
        super()._put(item)
        self._filled.value = 1
