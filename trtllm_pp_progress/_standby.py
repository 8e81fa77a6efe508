"""The standby: who drives while the Python driver is silent; a native thread, a thread parked in MPI, or nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_pp_progress._parked import Parked
from trtllm_pp_progress._understudy import CROWDED_SILENCE_S, SILENCE_S, Understudy, UnderstudyUnavailable

__all__ = ["SILENT_S", "Standby", "choose"]

SILENT_S = 0.02  # a driver that wakes this much too late was kept from it, by the GIL as a rule
KINDS: dict[str, Callable[[float], Any]] = {"native": Understudy, "thread": Parked}


class Standby:
    """The second driver of one executor, or the note that there is none and why.

    `arm()` notes that a send is pending, or about to be, and that the Python driver is at work on it now. Any thread
    may call it and rest(). Arm once others can see the send: a rest() in another thread then sees it too, or comes
    first. (The ring arms before its isend as well, and a rest() of another thread would undo that much.) Without a
    driver they cost next to nothing, and how often and how long the Python driver was silent is counted instead.
    """

    def __init__(
        self, runs: str = "poll", reason: str = "", driver: Any = None, say: Callable[..., object] = lambda *_: None
    ) -> None:
        """Take `driver` (Understudy, Parked or None); `runs` and `reason` are what status() says.

        `say` is told of silences: how many, the longest in seconds, the reason.
        """
        self.runs, self.reason = runs, reason
        self._driver, self._say = driver, say
        self.arm: Callable[[], None] = driver.driven if driver is not None else lambda: None
        self.silences, self.longest_silence_s = 0, 0.0

    def rest(self, pending: Callable[[], bool], receiving: bool = False) -> None:
        """Let the second driver sleep unless `pending()`.

        `receiving`: the Python driver is about to sit in a receive, inside MPI as a rule, where it drives too.
        """
        if self._driver is None:
            return
        if not pending():
            self._driver.idle()
            if pending():  # posted in between, and armed before idle()
                self.arm()
        elif receiving:
            self._driver.receiving()

    def overslept(self, late_s: float) -> None:
        """Take note that the Python driver came back so much too late, if nobody stood in for it."""
        if self._driver is None and late_s >= SILENT_S:
            self.silences += 1
            self.longest_silence_s = max(self.longest_silence_s, late_s)
            self._say(self.silences, self.longest_silence_s, self.reason)

    def stop(self) -> None:
        """Join the second driver, for good."""
        if self._driver is not None:
            self._driver.stop()

    def status(self) -> dict[str, Any]:
        """Return which driver runs and why, its state and calls of MPI, and the silences (seconds)."""
        driver = self._driver
        state, ticks = (driver.state, driver.ticks) if driver is not None else ("none", 0)
        silent = {"silences": self.silences, "longest_silence_s": self.longest_silence_s}
        return {"runs": self.runs, "reason": self.reason, "state": state, "ticks": ticks} | silent


def choose(mode: str, crowded: bool, say: Callable[..., object]) -> Standby:
    """Start what a mode asks for and return it; without a second driver, with the reason, where it cannot run.

    `auto` is the native thread where it was built. `crowded`: threads share cores, so step in later. On the main
    thread, once MPI is initialised; never raises.
    """
    if mode == "poll":
        return Standby("poll", "selected", say=say)
    runs = "native" if mode == "auto" else mode
    try:
        driver = KINDS[runs](CROWDED_SILENCE_S if crowded else SILENCE_S)
    except UnderstudyUnavailable as error:
        return Standby("poll", str(error), say=say)
    except Exception as error:  # of MPI, or of a system that is out of threads
        return Standby("poll", f"{runs} does not start: {error!r}", say=say)
    return Standby(runs, "it is built" if mode == "auto" else "selected", driver)
