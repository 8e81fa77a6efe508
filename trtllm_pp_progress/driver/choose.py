"""Who drives while the Python threads cannot: a native thread, or nobody, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_pp_progress.driver.library import DriverUnavailableError
from trtllm_pp_progress.driver.native import CROWDED_SILENCE_S, SILENCE_S, NativeDriver
from trtllm_pp_progress.driver.tester import NativeTester

__all__ = ["LATE_S", "Driver"]

LATE_S = 0.02  # a thread that wakes this much too late was kept from it, by the GIL as a rule


class Driver:
    """The native driver of one executor once it was started, or the note that there is none and why.

    `arm()` notes that a send is pending, or about to be, and that a Python thread is at work on it now. Any thread may
    call it and rest(). Arm once others can see the send: a rest() in another thread then sees it too, or comes first.
    Without a native driver they cost next to nothing, and how often and how long nobody drove is counted instead.
    """

    def __init__(self, mode: str = "poll", say: Callable[..., object] = lambda *_: None) -> None:
        """Take the mode of the settings; `say` is told of silences: how many, the longest in seconds, the reason."""
        self._mode, self._say = mode, say
        self._native: NativeDriver | None = None
        self.tester: NativeTester | None = None
        self.silences, self.longest_silence_s = 0, 0.0
        self._off = self._crowded = self._ended = False
        self.reason = "selected" if mode == "poll" else "not started"

    def start(self, crowded: bool) -> None:
        """Start what the mode asks for; without it, with the reason, where it cannot run.

        `crowded`: threads share cores, so step in later. On the main thread, once MPI is initialised. Never raises.
        """
        self._ended = False
        if self._mode == "poll" or self.native:
            return
        self._crowded = crowded
        try:
            self._native = NativeDriver(CROWDED_SILENCE_S if crowded else SILENCE_S, lingers=not crowded)
            self.tester = NativeTester(yields=crowded)
            self.reason = "it is built" if self._mode == "auto" else "selected"
        except DriverUnavailableError as error:
            self.reason = str(error)
        except Exception as error:  # of MPI, or of a system that is out of threads
            self.reason = f"native does not start: {error!r}"

    @property
    def may_spin(self) -> bool:
        """Whether a wait may look again and again for a while: tests take no GIL, and each thread has a core."""
        return self.tester is not None and not self._crowded

    @property
    def native(self) -> bool:
        """Whether a native thread steps in now."""
        return self._native is not None and self._native.runs

    def arm(self, planned_s: float = 0.0) -> bool:
        """Note that a send is pending and was driven just now; it will be again in `planned_s` seconds.

        Tells whether a native thread will step in.
        """
        return self._native is not None and not self._off and self._native.driven(planned_s)

    def turn(self, on: bool) -> None:
        """Let the native driver sleep whatever is pending, or let it be armed again."""
        self._off = not on
        if self._off and self._native is not None:
            self._native.idle()

    def rest(self, pending: Callable[[], bool], receiving: bool = False) -> None:
        """Let the native driver sleep unless `pending()`.

        `receiving`: the relay is about to sit in a receive, inside MPI as a rule, where it drives too.
        """
        if self._native is None or not self._native.armed:
            return  # as a rule, and a relay that is about to sleep has the GIL which others want
        if not pending():
            self._native.idle()
            if pending():  # posted in between, and armed before idle()
                self.arm()
        elif receiving and not self._off:
            self._native.receiving()

    def overslept(self, late_s: float) -> None:
        """Take note that a Python driver came back so much too late, if nobody stepped in for it."""
        if late_s >= LATE_S and not (self.native or self._ended):
            self.silences += 1
            self.longest_silence_s = max(self.longest_silence_s, late_s)
            reason = self.reason if self._native is None else self._native.state
            self._say(self.silences, self.longest_silence_s, reason)

    def stop(self, timeout_s: float | None = None) -> None:
        """End the native driver, waiting for it `timeout_s` seconds (default: as long as an exit may take)."""
        self._ended = True  # what is still pending is upstream's or the keeper's
        if self._native is not None:
            self._native.stop(*(() if timeout_s is None else (timeout_s,)))

    def status(self) -> dict[str, Any]:
        """Return which driver runs and why, its state and calls of MPI, and the silences (seconds)."""
        native = self._native
        state, ticks = (native.state, native.ticks) if native is not None else ("none", 0)
        silent = {"silences": self.silences, "longest_silence_s": self.longest_silence_s}
        runs = "poll" if native is None else "native"
        return {"runs": runs, "reason": self.reason, "state": state, "ticks": ticks} | silent
