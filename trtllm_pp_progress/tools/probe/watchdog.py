"""A watchdog beside a rank: the rank is a forked child, and its parent knows which step it is in and for how long.

A thread could not do it: it would stop with the rank, starve under a held GIL, and could not tell a killed rank.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

__all__ = ["CANNOT_TELL", "DONE", "MOVES", "PARKS", "TOO_LATE", "Steps", "guard", "verdict"]

MOVES, PARKS, CANNOT_TELL = 0, 1, 2  # exit codes
TOO_LATE = "it did not get through"
DONE = "exiting with "


def verdict(code: int) -> str:
    """Return an exit code in words."""
    return {MOVES: "moves", PARKS: "parks"}.get(code, "cannot tell")


class Steps:
    """What a rank tells its watchdog: the step it begins, and how many seconds that may take."""

    def __init__(self, pipe: int, limit_s: float) -> None:
        self._pipe, self._limit_s = pipe, limit_s

    def __call__(self, name: str, limit_s: float | None = None) -> None:
        """Begin a step, which ends when the next one begins."""
        os.write(self._pipe, f"{limit_s or self._limit_s} {name}\n".encode())

    def done(self, code: int) -> None:
        """Announce the exit code: one that was not announced is a failure, for a traceback's is 1, too."""
        os.write(self._pipe, f"{self._limit_s} {DONE}{code}\n".encode())


def guard(limit_s: float, complain: Callable[[str], None]) -> Steps:
    """Fork. Return in the child, which becomes the rank; the parent never returns and exits as the child does.

    Where the child is killed, exits with a code that it did not announce, or exceeds the limit of a step, the parent
    says in one line which step that was, and exits with CANNOT_TELL. The child dies with its parent. Call it before
    MPI and any thread is started.
    """
    told, tell = os.pipe()
    sys.stdout.flush()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(told)
        _die_with(parent)
        return Steps(tell, limit_s)
    os.close(tell)
    code, problem = _watch(child, told, limit_s)
    if problem:
        complain(problem)
    os._exit(code)


def _watch(child: int, told: int, limit_s: float) -> tuple[int, str]:
    step, deadline, text = "starting", time.monotonic() + limit_s, b""
    while True:
        ready, _, _ = select.select([told], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return CANNOT_TELL, f"{TOO_LATE} '{step}' within {limit_s:g} s"
        if not (data := os.read(told, 4096)):
            break
        *lines, text = (text + data).split(b"\n")
        if lines:
            limit, step = lines[-1].decode().split(" ", 1)
            limit_s = float(limit)
            deadline = time.monotonic() + limit_s
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        return CANNOT_TELL, f"it was ended by {signal.Signals(-code).name} in '{step}'"
    if step != f"{DONE}{code}":
        return CANNOT_TELL, f"it failed in '{step}' with exit code {code}"
    return code, ""


def _die_with(parent: int) -> None:
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(CANNOT_TELL)
