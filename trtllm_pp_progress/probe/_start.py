"""Run the probe: as a rank of somebody's mpirun, or in an mpirun of its own for each transport asked for."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress._settings import Settings, load
from trtllm_pp_progress.bench._launch import RANK_VARIABLES, launch, under_mpi
from trtllm_pp_progress.probe._guard import CANNOT_TELL, MOVES, PARKS, guard
from trtllm_pp_progress.probe._rank import probe_rank
from trtllm_pp_progress.probe._report import write_json

__all__ = ["probe"]

FAILED = 70  # no verdict: the watchdog says what it was


def probe(
    ranks: int,
    transport: Sequence[str],
    sizes: Sequence[int],
    step_timeout: float,
    timeout: float,
    json_file: Path | None,
) -> int:
    """Probe and return the exit code: 0 all sends move, 1 some park, 2 it cannot be told."""
    load(Settings)  # a bad variable is said once, here, not by every rank
    if under_mpi(os.environ):
        return _as_rank(transport[0], sizes, step_timeout, json_file)
    codes: list[int] = []
    runs: list[dict[str, Any]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in transport:
            part = Path(folder) / f"{name}.json"
            arguments = ["-m", "trtllm_pp_progress", "probe", "--transport", name, "--json", str(part)]
            arguments += ["--sizes", ",".join(map(str, sizes)), "--step-timeout", str(step_timeout)]
            code = launch(ranks, name, arguments, timeout)
            if code not in (MOVES, PARKS, CANNOT_TELL):
                problems.append(f"the ranks over {name} ended with exit code {code}")
                code = CANNOT_TELL
                click.echo(f"Error: {problems[-1]}", err=True)
            codes.append(code)
            if part.exists():
                written = json.loads(part.read_text(encoding="utf-8"))
                runs += written["runs"]
                problems += [written["problem"]] if written["problem"] else []
    code = max(codes)
    if json_file is not None:
        write_json(json_file, runs, code, "; ".join(problems))
    return code


def _as_rank(transport: str, sizes: Sequence[int], step_timeout: float, json_file: Path | None) -> int:
    rank = next(os.environ[name] for name in RANK_VARIABLES if name in os.environ)

    def complain(problem: str) -> None:
        problem = f"rank {rank}: {problem}"
        click.echo(f"Error: {problem}", err=True)
        if json_file is not None:
            write_json(json_file, [], CANNOT_TELL, problem)

    step = guard(step_timeout, complain)
    try:
        return probe_rank(step, transport, sizes, json_file)
    except click.ClickException:
        step.done(CANNOT_TELL)
        raise
    except Exception:
        traceback.print_exc()
        os._exit(FAILED)  # not through MPI_Finalize, which may wait for the other ranks
