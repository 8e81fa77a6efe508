"""One burst of tests: bounded by a budget and in time, and fair to every pending send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_pp_progress.driver.choose import Driver
from trtllm_pp_progress.progress.handles import UnknownShapeError
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.progress.sends import Pending, Sends
from trtllm_pp_progress.progress.table import clear_slot

__all__ = ["DRIVE_S", "MOVING_S", "SLOW_TESTS", "SLOW_TEST_S", "UNCERTAIN_POLLS", "Burst", "SlowTestError"]

DRIVE_S = 0.001  # then a burst ends, whatever is left of its budget
MOVING_S = 0.01  # the same where a batch ends it at once: what begins a burst takes 5 to 10 % of DRIVE_S
SLOW_TEST_S = 0.025  # longer than a test waits for the GIL, as a rule
SLOW_TESTS = 8  # in a row: then a kind of handle is left to upstream's wait (pmodels/mpich#6836 is of that kind)
UNCERTAIN_POLLS = 10_000  # then a handle that may only complete in wait() is left to upstream's wait


class SlowTestError(UnknownShapeError):
    """A kind of handle is not worth polling, for a test of it is slow; said apart from other shapes."""


class Burst:
    """Tests the sends of one engine; the caller holds the lock of their table.

    `leave(sends, slot, handle, why)` is called for a handle that raised, or that is not worth polling.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        stall_warning_s: float,
        driver: Driver,
        log: Log,
        leave: Callable[[Sends, int, Any, Exception], object],
    ) -> None:
        self._clock, self._driver, self._log, self._leave = clock, driver, log, leave
        self._stall_warning_s = stall_warning_s
        self.moved = False  # whether data moved in the last run, as far as can be told
        self._slow: Counter[type] = Counter()  # by kind of handle: tests in a row that were slow

    def run(
        self, handles: Any, sends: Sends, records: Sequence[Pending], budget: int, stop: int | None = None
    ) -> Sequence[Pending]:
        """Test records in turn until all are complete, the budget is spent or time is up; return what is left.

        `stop` is the address of a word that ends the burst as soon as it is not 0.
        """
        ends, left, self.moved = self._clock() + DRIVE_S, budget, False
        while left > 0 and records:
            for record in records[:left]:
                left -= self._test(handles, sends, record, max(1, left // len(records)), stop)
                if self._clock() >= ends:
                    left = 0
                if left <= 0:
                    break
            if records := [record for record in records if sends.is_pending(record)]:
                self._driver.arm()
        for record in records:
            self._warn_stalled(sends, record)
        return records

    def _test(self, handles: Any, sends: Sends, record: Pending, most: int, stop: int | None) -> int:
        """Test a send, at most `most` times where that takes no GIL, else once; return how often."""
        started, used = self._clock(), 1
        try:
            if self._takes(sends, record.handle):
                limit_s = DRIVE_S if stop is None else MOVING_S
                done = sends.native(record.handle, most, limit_s, stop)  # type: ignore[misc]
                used, self.moved = sends.native.used, self.moved or sends.native.moved  # type: ignore[union-attr]
            else:
                done = record.completion.done()
            now = self._clock()
            if done:
                sends.complete(record, now)  # before the slot is clear, for then others write to it
                if handles[record.slot] is record.handle:
                    clear_slot(handles, record.slot)
            else:
                sends.tested(record)
                self._judge(sends, record.handle, (now - started) / used)
                if not record.completion.certain and record.polls >= UNCERTAIN_POLLS:
                    raise UnknownShapeError(f"{type(record.handle).__qualname__}: polls do not complete it, wait() may")
        except Exception as error:
            self._leave(sends, record.slot, record.handle, error)
        sends.counters.polls += used
        record.polls += used
        return used

    def finish(self, handles: Any, sends: Sends, slot: int, rounds: int, limit_s: float) -> bool:
        """Test the send of a slot from C until it is complete, or for `limit_s`; False also where that cannot be done.

        Nothing is made or looked up for it: for waits on upstream's critical path, and sends that are on their way.
        """
        handle, tester = handles[slot], self._driver.tester
        if tester is None or not tester.takes(handle) or (sends.left and sends.is_left(slot, handle)):
            return False
        native = sends.native = sends.native or tester.new()
        sends.counters.drives += 1
        started = self._clock()
        try:
            if done := native(handle, rounds, limit_s):
                sends.finished(slot, handle, self._clock())
                if handles[slot] is handle:
                    list.__setitem__(handles, slot, None)  # clear_slot, without a call
            else:
                self._judge(sends, handle, (self._clock() - started) / native.used)
        except Exception as error:
            self._leave(sends, slot, handle, error)
            return False
        finally:
            sends.counters.polls += native.used
        return done

    def _takes(self, sends: Sends, handle: Any) -> bool:
        if (tester := self._driver.tester) is None or not tester.takes(handle):
            return False
        if sends.native is None:
            sends.native = tester.new()
        return True

    def is_slow(self, handle: Any) -> bool:
        """Whether the last test in vain of this kind of handle was a slow one."""
        return self._slow[type(handle)] > 0

    def _judge(self, sends: Sends, handle: Any, seconds: float) -> None:
        """Raise SlowTestError where tests of this kind of handle are slow, one after the other."""
        kind = type(handle)
        self._slow[kind] = self._slow[kind] + 1 if seconds >= SLOW_TEST_S else 0
        if self._slow[kind] >= SLOW_TESTS:
            self._slow[kind] -= 1  # the next slow one of this kind is the last straw again
            sends.slow = True
            raise SlowTestError(f"a test of a {kind.__qualname__} takes {seconds:.3f} s again and again")

    def _warn_stalled(self, sends: Sends, record: Pending) -> None:
        if (now := self._clock()) - record.warned >= self._stall_warning_s:
            record.warned = now
            sends.counters.stalls += 1
            self._log.stalled(sends.name, record.slot, now - record.posted)
