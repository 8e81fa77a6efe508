"""Run the probe: as a rank of somebody's mpirun, or in an mpirun of its own for each transport asked for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.settings.schema import load
from trtllm_pp_progress.tools.job.launch import launch
from trtllm_pp_progress.tools.job.output import check_writable
from trtllm_pp_progress.tools.job.role import Role, role
from trtllm_pp_progress.tools.job.surroundings import initialization_off, suspects
from trtllm_pp_progress.tools.probe.rank import STARTING, probe_rank
from trtllm_pp_progress.tools.probe.table import write_json
from trtllm_pp_progress.tools.probe.watchdog import CANNOT_TELL, MOVES, PARKS, TOO_LATE, guard

__all__ = ["probe"]

INTERFACES = ("UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude", "FI_TCP_IFACE")
CONNECTING = ("starting MPI", "making a communicator", "exchanging host names")
FAILED = 70  # no verdict: the watchdog says what it was


def probe(
    ranks: int,
    transport: Sequence[str],
    sizes: Sequence[int],
    edge: bool,
    step_timeout: float,
    timeout: float,
    json_file: Path | None,
) -> int:
    """Probe and return the exit code: 0 all sends move, 1 some park, 2 it cannot be told."""
    load(Settings)  # a bad variable is said once, here, not by every rank
    own = role()
    if own is not None and (trouble := own.trouble()):
        raise click.ClickException(trouble)
    if initialization_off(os.environ):
        raise click.ClickException("MPI4PY_RC_INITIALIZE tells mpi4py not to start MPI: unset it")
    if own is None or own.rank == 0:
        check_writable(json_file)
    if own is not None:
        return _as_rank(own, transport[0], sizes, edge, step_timeout, json_file)
    codes: list[int] = []
    runs: list[dict[str, Any]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in transport:
            part = Path(folder) / f"{name}.json"
            arguments = ["-m", "trtllm_pp_progress", "probe", "--transport", name, "--json", str(part)]
            arguments += ["--sizes", ",".join(map(str, sizes)), "--step-timeout", str(step_timeout)]
            arguments += [] if edge else ["--no-edge"]
            code = launch(ranks, name, arguments, timeout)
            if code not in (MOVES, PARKS, CANNOT_TELL):
                problems.append(f"the ranks over {name} ended with exit code {code}{_suspected()}{_hint()}")
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


def _as_rank(
    own: Role, transport: str, sizes: Sequence[int], edge: bool, step_timeout: float, json_file: Path | None
) -> int:
    def complain(problem: str) -> None:
        problem = f"rank {own.rank}: {problem}{_suspected()}{_hint() if _connecting(problem) else ''}"
        click.echo(f"Error: {problem}", err=True)
        if json_file is not None:
            with contextlib.suppress(OSError):  # its folder may be on another host
                write_json(json_file, [], CANNOT_TELL, problem)

    step = guard(step_timeout, complain)
    try:
        return probe_rank(step, transport, sizes, edge, json_file)
    except (click.ClickException, SystemExit):
        step.done(CANNOT_TELL)
        raise
    except Exception:
        traceback.print_exc()
        os._exit(FAILED)  # not through MPI_Finalize, which may wait for the other ranks


def _suspected() -> str:
    """Return what here may be the cause of a rank's end, to follow its description."""
    found = suspects(os.environ)
    return found and f" (here: {found})"


def _connecting(problem: str) -> bool:
    """Tell whether a rank may have ended because it did not reach another one."""
    return TOO_LATE in problem or STARTING in problem or any(f"'{step}'" in problem for step in CONNECTING)


def _hint() -> str:
    """Return what to try where ranks do not reach each other: hosts may have one address twice, as docker0's."""
    named = [f"{name}={os.environ[name]}" for name in INTERFACES if name in os.environ]
    if named:
        return f"; do the ranks reach each other by {', '.join(named)}?"
    networks = sorted(name for _, name in socket.if_nameindex() if name != "lo")
    return (
        f"; between hosts, name a network that they share (here: {', '.join(networks) or 'none'}): an address both "
        "have (docker0) is no way: UCX_NET_DEVICES=NAME for UCX, OMPI_MCA_btl_tcp_if_include=NAME without it"
    )
