"""Notice when a rank's sampled-result broadcasts stand still, while the rank itself may be waiting for ever."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["StallWatch"]


class StallWatch:
    """Looks, from a thread of its own, whether something is under way although no step begins.

    It only asks; what is to be done is up to whom it tells. Between `stop` and `start` it asks nothing either: an event
    or a stream that is queried while another thread captures a graph can spoil the capture.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        steps: Callable[[], int],
        stalled: Callable[[float, bool], None],
        warn_s: float,
        clock: Callable[[], float] = time.monotonic,
        quiet: Callable[[], None] = lambda: None,
    ) -> None:
        """Take what to ask, and whom to tell: `stalled(seconds, over)`, once when it is a stall, once when it ends.

        `quiet()` is told at every look that finds that no step has begun since the one before.
        """
        self.stalls = 0
        self._busy = busy
        self._steps = steps
        self._say = stalled
        self._quiet = quiet
        self._warn_s = warn_s
        self._clock = clock
        self._asking = threading.Lock()
        self._told = False
        self._step = -1
        self._since = 0.0
        self._end: threading.Event | None = None

    def start(self) -> None:
        """Watch from now on; without effect while watching."""
        if self._end is None:
            self._end = threading.Event()
            arguments = (weakref.ref(self), self._end, self._warn_s / 8)
            threading.Thread(target=_run, args=arguments, name="pp-stall-watch", daemon=True).start()

    def stop(self) -> None:
        """Ask nothing any more; on return no question is under way."""
        with self._asking:
            if self._end is not None:
                self._end.set()
                self._end = None
            self._told = False

    def stalled_s(self) -> float:
        """Return for how long the present stall has lasted, in seconds; 0 where there is none."""
        return self._clock() - self._since if self._told else 0.0

    def look(self) -> None:
        """Ask once."""
        now, step = self._clock(), self._steps()
        if step == self._step:
            self._quiet()
        if step == self._step and self._busy():
            if not self._told and now - self._since >= self._warn_s:
                self._told = True
                self.stalls += 1
                self._say(now - self._since, False)
            return
        if self._told:
            self._told = False
            self._say(now - self._since, True)
        self._step, self._since = step, now

    def ask(self, end: threading.Event) -> bool:
        """Look, unless that is over; say whether to go on."""
        with self._asking:
            if end.is_set():
                return False
            try:
                self.look()
            except Exception:  # a GPU in error answers nothing; vLLM will say what it is
                return False
            return True


def _run(reference: weakref.ref[StallWatch], end: threading.Event, pause_s: float) -> None:
    """Ask again and again; keeps neither the watch nor the worker behind it alive."""
    while not end.wait(pause_s):
        watch = reference()
        if watch is None or not watch.ask(end):
            return
        del watch
