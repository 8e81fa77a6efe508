"""The job as one of its ranks sees it: COMM_WORLD once it is what was asked for, and the end of all if one fails."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from trtllm_pp_progress.tools.job.library import described, load
from trtllm_pp_progress.tools.job.options import BAD_INPUT
from trtllm_pp_progress.tools.job.role import Role, role

__all__ = ["abort_on_failure", "check_world", "end_all", "start_mpi", "world"]

GRACE_S = 2.0  # a launcher ends all ranks with the first that fails: rank 0 is to have said why by then


@contextlib.contextmanager
def world(ranks: int) -> Iterator[Any]:
    """Give COMM_WORLD of `ranks` ranks; a failure of the block on one of them ends all, with exit code 1.

    Ends every rank with exit code 2, and one line on rank 0, where there are more or fewer, or two threads of a rank
    must not be in MPI. Raises ClickException where mpi4py cannot be used.
    """
    comm = start_mpi().COMM_WORLD
    check_world(comm, ranks)
    with abort_on_failure(comm):
        yield comm


def start_mpi() -> Any:
    """Import mpi4py.MPI, which starts MPI, and return it.

    ClickException where this process is no rank of two or more that MPI can join, or mpi4py cannot be used or does not
    start MPI. Where all ranks find the same, one line is enough: rank 0 says it, the others leave with exit code 2.
    """
    own = role()
    if own is not None and (trouble := own.trouble()):
        raise click.ClickException(trouble)
    if own is not None and (library := load(os.environ)) and own.cannot_join(library):
        _refuse(own, own.mismatch(library))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(f"mpi4py cannot be used: {error}; pip install mpi4py") from None
    if not MPI.Is_initialized():
        problem = (
            f"mpi4py is told not to start {described(MPI).name}: unset MPI4PY_RC_INITIALIZE, or mpi4py.rc.initialize"
        )
        _refuse(own, problem)
    if own is not None and MPI.COMM_WORLD.Get_size() == 1:
        _refuse(own, own.mismatch(described(MPI)))
    return MPI


def _refuse(own: Role | None, problem: str) -> NoReturn:
    if own is None or own.rank == 0:
        raise click.ClickException(problem)
    time.sleep(GRACE_S)
    raise SystemExit(BAD_INPUT)


def check_world(comm: Any, ranks: int) -> None:
    """End every rank with exit code 2, and one line on rank 0, where this MPI cannot run `ranks` stages."""
    from mpi4py import MPI as mpi

    problem = None
    if comm.Get_size() != ranks:
        problem = f"{comm.Get_size()} ranks were started, but --pp is {ranks}: they must be the same"
    elif mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        problem = (
            f"MPI thread level {mpi.Query_thread()} is too low: MPI_THREAD_MULTIPLE ({mpi.THREAD_MULTIPLE}) is needed"
        )
    if problem is not None:
        end_all(comm, problem)


def end_all(comm: Any, problem: str) -> NoReturn:
    """End every rank with exit code 2, and one line on rank 0; every rank calls it."""
    if comm.Get_rank() == 0:
        click.echo(f"Error: {problem}", err=True)
    raise SystemExit(BAD_INPUT)


@contextlib.contextmanager
def abort_on_failure(comm: Any) -> Iterator[None]:
    """End all ranks, with exit code 1, when the block raises on one: the others would wait for it for ever."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        comm.Abort(1)
