"""What MPI is in this process; never imports it, for that would initialise it where nobody uses it."""

from __future__ import annotations

import enum
import os
import sys
from typing import Any

__all__ = [
    "LEVELS",
    "MpiUnusableError",
    "State",
    "ended",
    "finalize_progresses",
    "level_name",
    "note_end",
    "running",
    "state",
    "thread_multiple",
    "usable",
]

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")  # MPI 4.1, section 11.2.1, from the lowest

_forked = False  # this process is the child of one that uses MPI
ended = False  # MPI_Finalize has begun, as far as before_finalize() knows: where state() costs too much


class MpiUnusableError(RuntimeError):
    """No thread of ours may enter MPI now; the message is the reason, fit for status() and doctor."""


class State(enum.Enum):
    """How far MPI has come in this process."""

    ABSENT = "mpi4py is not in use in this process"
    NOT_INITIALIZED = "MPI is not initialized"
    RUNNING = "MPI is running"
    FINALIZED = "MPI is already finalized"


def state() -> State:
    """Return how far MPI has come."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return State.ABSENT
    if ended or mpi.Is_finalized():
        return State.FINALIZED
    return State.RUNNING if mpi.Is_initialized() else State.NOT_INITIALIZED


def finalize_progresses() -> bool:
    """Tell whether a pending send still moves inside MPI_Finalize; true where MPI does not run.

    Open MPI waits for all ranks there and makes progress meanwhile, MPICH closes its endpoints first (both seen).
    """
    mpi = running()
    return mpi is None or mpi.get_vendor()[0] == "Open MPI"


def note_end() -> None:
    """Note that MPI_Finalize has begun: whoever is not in MPI yet stays out."""
    global ended
    ended = True


def running() -> Any | None:
    """Return mpi4py.MPI between its initialisation and its end, else None."""
    return sys.modules["mpi4py.MPI"] if state() is State.RUNNING else None


def level_name(mpi: Any) -> str:
    """Return the thread level that MPI runs with, one of LEVELS."""
    return {getattr(mpi, f"THREAD_{name}"): name for name in LEVELS}[mpi.Query_thread()]


def thread_multiple() -> bool:
    """Tell whether two threads may be in MPI at once; true where MPI does not run, for then none will be."""
    mpi = running()
    return mpi is None or level_name(mpi) == LEVELS[-1]


def usable() -> Any:
    """Return mpi4py.MPI if a second thread may enter MPI now; raise MpiUnusableError with the reason if not."""
    if _forked:
        raise MpiUnusableError("this process was forked from one that uses MPI")
    if (found := state()) is not State.RUNNING:
        raise MpiUnusableError(found.value)
    mpi = sys.modules["mpi4py.MPI"]
    if not thread_multiple():
        raise MpiUnusableError(f"a second thread in MPI needs THREAD_MULTIPLE, this MPI runs with {level_name(mpi)}")
    return mpi


def _note_fork() -> None:
    global _forked
    _forked = _forked or state() is State.RUNNING


os.register_at_fork(after_in_child=_note_fork)
