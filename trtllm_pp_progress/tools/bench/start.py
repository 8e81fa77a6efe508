"""Run the bench: as a rank of somebody's mpirun, or in mpiruns of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.settings.schema import load
from trtllm_pp_progress.tools.bench.alternatives import bench_with_alternatives
from trtllm_pp_progress.tools.bench.scenarios import ALTERNATIVES
from trtllm_pp_progress.tools.job.launch import rank_or_launch
from trtllm_pp_progress.tools.job.output import check_writable
from trtllm_pp_progress.tools.job.role import role
from trtllm_pp_progress.tools.job.surroundings import initialization_off
from trtllm_pp_progress.tools.job.world import world

__all__ = ["bench"]


def bench(pp: int, transport: Sequence[str], timeout: float, json_file: Path | None, **options: Any) -> int:
    """Measure and return the exit code: 0, 1 if a payload was wrong, or that of the first job that failed."""
    load(Settings)  # a bad variable is said once, here, not by every rank
    if len(transport) != 1:
        raise click.ClickException("--transport takes one transport")
    if initialization_off(os.environ):
        raise click.ClickException("MPI4PY_RC_INITIALIZE tells mpi4py not to start MPI: unset it")
    if alternatives := [policy for policy in options["policies"] if policy in ALTERNATIVES]:
        if role() is not None:
            raise click.ClickException(
                f"policy {alternatives[0]!r} is a setting of the whole run: leave starting mpirun to the bench"
            )
        check_writable(json_file)
        return bench_with_alternatives(pp, transport[0], timeout, json_file=json_file, **options)
    rank_or_launch(pp, transport[0], ["-m", "trtllm_pp_progress", *sys.argv[1:]], timeout, json_file)
    with world(pp) as comm:
        from trtllm_pp_progress.tools.bench.rank import bench_rank  # needs mpi4py, which world() has tried

        return bench_rank(comm, transport[0], json_file=json_file, **options)
