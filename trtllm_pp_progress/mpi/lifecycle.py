"""When MPI ends: what has to be done before."""

from __future__ import annotations

from collections.abc import Callable

from trtllm_pp_progress.mpi import facts

__all__ = ["before_finalize"]

_announced: list[Callable[[], object]] = []


def before_finalize(callback: Callable[[], object], running: bool = False) -> None:
    """Have `callback()` called when somebody calls MPI.Finalize by hand; once each, and only where MPI is running.

    MPI_Finalize deletes the attributes of COMM_SELF first of all, the last one set first, while MPI still works (MPI
    4.1, section 11.2.4). From then on facts.state() says that MPI is finalized; with `running` not before `callback` is
    done. Not called when mpi4py finalizes MPI by itself, which is after the interpreter's end.
    """

    def ends() -> None:
        if not running:
            facts.note_end()
        callback()

    if callback not in _announced and (mpi := facts.running()) is not None:
        _announced.append(callback)
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: ends()), None)
