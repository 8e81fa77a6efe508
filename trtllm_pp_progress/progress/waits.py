"""The one wait loop, and how long the pauses between two looks are."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

from trtllm_pp_progress.settings.core import Settings

__all__ = ["LONGEST_PAUSE_S", "bounded", "pauses", "wait_until"]

SHARE = 0.02  # of the time waited so far: what a pause may add to it once the longest set pause is less
LONGEST_PAUSE_S = 0.02


def pauses(settings: Settings, clock: Callable[[], float], at_once_s: float = 0.0) -> Iterator[float]:
    """Yield the pauses between two looks, in seconds.

    0.0, which is no pause, for the first `at_once_s`; then from backoff_min_us, doubling up to backoff_max_us. A
    receiver that stays away is looked for less often: the pause grows with the time waited, to LONGEST_PAUSE_S at most.
    """
    started, pause = clock(), settings.backoff_min_us * 1e-6
    while clock() - started < at_once_s:
        yield 0.0
    while True:
        yield pause
        longest = min(SHARE * (clock() - started), LONGEST_PAUSE_S)
        pause = min(2 * pause, max(settings.backoff_max_us * 1e-6, longest))


def wait_until(
    done: Callable[[], bool],
    pause_for: Iterator[float],
    pause: Callable[[float], object],
    clock: Callable[[], float],
    ends: Callable[[], float] = lambda: math.inf,
) -> bool:
    """Call `done()` until it is true, pausing in between; return False once `ends()` has passed without."""
    while not done():
        if clock() >= ends():
            return False
        if seconds := next(pause_for):
            pause(seconds)
    return True


def bounded(wait: Callable[[], object], seconds: float) -> bool:
    """Call a wait that has no end of its own; return False if it is not over in `seconds`, and raise what it raises.

    It goes on in a thread that nothing waits for. Where no thread can be started, as at the interpreter's end in Python
    3.12, the wait has no other end than its own.
    """
    raised: list[BaseException] = []

    def call() -> None:
        try:
            wait()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, name="pp-upstreams-wait", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        wait()
        return True
    thread.join(max(seconds, 0.01))  # what is complete is to be seen complete, late or not
    if raised:
        raise raised[0]
    return not thread.is_alive()
