"""The end of a process has an order: first every wait gets a deadline, then Python leaves MPI, native drivers last.

Upstream may shut its executors down from atexit, before or after us. So at exit nothing is taken away from it: engines
close, which bounds its waits, idle threads of ours leave MPI, and the native drivers go on until MPI_Finalize.
"""

from __future__ import annotations

import atexit

from trtllm_pp_progress.installation.records import engines
from trtllm_pp_progress.mpi.facts import finalize_progresses
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.progress.slot_wait import begin_end

__all__ = ["close_all", "finish_all", "retire_all"]


def finish_all() -> None:
    """Let the keeper finish, for as long as a cleanup may take, where MPI_Finalize would end what it has."""
    if not finalize_progresses():
        KEEPER.finish()


@atexit.register
def close_all() -> None:
    """Give every wait a deadline, and let idle threads leave MPI: they must not be in it while it is finalized.

    Where upstream shuts down after this, the keeper is gone by then, and its time is the waits' own.
    """
    for engine in engines():
        engine.patience = 1 if finalize_progresses() else 2
        if engine.deadline is not None:  # its cleanup is under way
            engine.deadline += (engine.patience - 1) * engine.settings.drain_deadline_s
        else:
            begin_end(engine)
        engine.relay.out = True
    finish_all()
    KEEPER.stop(native=False)


def retire_all() -> None:
    """Leave MPI for good: it is being finalized by hand."""
    for engine in engines():
        engine.retire()
    KEEPER.stop()
