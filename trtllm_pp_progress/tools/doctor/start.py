"""Run the doctor: alone, or as a rank of somebody's mpirun, whose ranks' reports become one."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click
from rich.console import Console

from trtllm_pp_progress.tools.doctor.findings import EXIT_CODES
from trtllm_pp_progress.tools.doctor.on_launcher import MISMATCH
from trtllm_pp_progress.tools.doctor.ranks import together
from trtllm_pp_progress.tools.doctor.report import collect
from trtllm_pp_progress.tools.doctor.screen import render
from trtllm_pp_progress.tools.job.console import console, unread
from trtllm_pp_progress.tools.job.hosts import hosts_of_ranks
from trtllm_pp_progress.tools.job.role import Role, role
from trtllm_pp_progress.tools.job.world import start_mpi
from trtllm_pp_progress.tools.probe.watchdog import DONE, guard

__all__ = ["doctor"]

LAST_STEP = "MPI_Finalize"
OTHERS_S = 60.0  # by how much later than this rank another may be ready, besides what its imports may take


def doctor(as_json: bool, timeout: float, measure: bool = True) -> int:
    """Print the report, of all ranks on rank 0, and return its exit code, which all ranks share.

    Where ranks do not come together each says in a line what it found itself, and the exit code is 2.
    """
    report = collect(timeout, measured=measure)
    own = role(os.environ)
    if own is not None and report["mpi"]["state"] == "ok" and report["launcher"]["problem"] is None:
        return _as_rank(own, report, as_json, 2 * timeout + OTHERS_S)
    if own is None or own.rank == 0:  # ranks that cannot come together have found the same
        _show(report, as_json, Console(highlight=False))
    return EXIT_CODES[report["verdict"]]


def _as_rank(own: Role, report: dict[str, Any], as_json: bool, limit_s: float) -> int:
    def complain(problem: str) -> None:
        click.echo(f"Error: rank {own.rank}: the ranks' reports did not come together: {problem}", err=True)
        if LAST_STEP in problem or DONE in problem:
            return  # the report is out already
        if as_json:
            _show(report, as_json, console(sys.stdout))
        else:
            click.echo(f"rank {own.rank}: {report['verdict']}: {report['reason']}")

    step = guard(limit_s, complain)
    step("starting MPI")
    try:
        mpi = start_mpi()
    except click.ClickException:  # it is alone, which its launcher's variables did not show
        _show(_alone(own, report), as_json, console(sys.stdout))
        step.done(EXIT_CODES["unknown"])
        return EXIT_CODES["unknown"]
    except SystemExit:
        step.done(EXIT_CODES["unknown"])
        raise
    step("finding out who shares memory")
    hosts = hosts_of_ranks(mpi.COMM_WORLD)
    step("gathering the reports")
    reports = mpi.COMM_WORLD.gather(report)
    whole = None
    if reports is not None:
        whole = together(reports, hosts) if len(reports) > 1 else report
        _show(whole, as_json, console(sys.stdout))
    code = int(mpi.COMM_WORLD.bcast(whole and EXIT_CODES[whole["verdict"]]))
    step(LAST_STEP)
    sys.stdout.flush()
    mpi.Finalize()
    step.done(code)
    return code


def _alone(own: Role, report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a rank whose MPI has started alone: nothing that was found is true of a job."""
    library = f"{report['mpi']['vendor']} {report['mpi']['version']}"
    found = MISMATCH.found(said=own.said, launcher=own.launcher, library=library).written()
    return {**report, "verdict": "unknown", "reason": found["means"], "findings": [found, *report["findings"]]}


def _show(report: dict[str, Any], as_json: bool, out: Console) -> None:
    with unread():
        if as_json:
            click.echo(json.dumps(report, indent=2))
        else:
            render(report, out)
