"""Put everything together: the report of the doctor as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trtllm_pp_progress.tools.doctor import machine as _machine
from trtllm_pp_progress.tools.doctor.findings import findings, verdict
from trtllm_pp_progress.tools.doctor.kinds import SEVERITIES
from trtllm_pp_progress.tools.doctor.launcher import look_at_launcher
from trtllm_pp_progress.tools.doctor.measure import measure
from trtllm_pp_progress.tools.doctor.mpi import look_at_mpi
from trtllm_pp_progress.tools.doctor.transport import judge
from trtllm_pp_progress.tools.doctor.upstream import look_at_upstream
from trtllm_pp_progress.tools.job.library import Library
from trtllm_pp_progress.vllm.diagnosis import findings as findings_of_vllm

__all__ = ["collect"]

SCHEMA = 1
MEASURE_S = 60.0
ELSEWHERE = ("layer", "btls", "provider", "ucx")  # of what is found of MPI: it has a section of its own


def collect(
    timeout_s: float = 120.0, environ: Mapping[str, str] | None = None, measured: bool = True
) -> dict[str, Any]:
    """Return the report: what is here, what it means, what to do. Its keys are listed in docs/doctor.md.

    MPI and TensorRT-LLM are imported by children that get `timeout_s` seconds each; nothing they do can end or hang
    this process. Run it as the workers are run: same user, same variables, same limits. With `measured` two ranks are
    started on this host, where that is possible and this is not itself a rank of a job, for at most a minute.
    """
    environ = dict(os.environ if environ is None else environ)
    mpi = look_at_mpi(timeout_s, environ)
    library = Library(mpi["vendor"], mpi["version"], mpi["library"], mpi["libmpi"] or "?") if mpi["vendor"] else None
    launcher = look_at_launcher(environ, library)
    found, why_not = None, _not_measured(mpi, launcher, measured)
    if why_not is None:
        found, why_not = measure(environ, min(timeout_s, MEASURE_S))
    transport = judge(mpi["layer"], mpi["btls"], mpi["ucx"], mpi["provider"], found)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "package": _machine.package(environ),
        "tensorrt_llm": look_at_upstream(timeout_s, environ),
        "launcher": launcher,
        "mpi": {name: value for name, value in mpi.items() if name not in ELSEWHERE},
        "transport": {**transport, "measured": found, "not_measured": why_not, "ucx": mpi["ucx"]},
        "cores": _machine.cores(environ),
        "surroundings": _machine.surroundings(environ),
        "environment": _machine.environment(environ),
    }
    made = findings(report)
    word, reason = verdict(report, made)
    written = [*(finding.written() for finding in made), *findings_of_vllm(environ)]
    written.sort(key=lambda finding: SEVERITIES.index(finding["severity"]))
    return {**report, "verdict": word, "reason": reason, "findings": written}


def _not_measured(mpi: Mapping[str, Any], launcher: Mapping[str, Any], measured: bool) -> str | None:
    """Return why two ranks are not started here, or None."""
    if not measured:
        return "it was told not to"
    if mpi["thread_level"] is None:
        return "MPI does not start here"
    if launcher["said"] is not None:
        return f"this is itself a rank of a job ({launcher['said']})"
    if launcher["path"] is None:
        return "there is no mpirun here"
    if launcher["problem"] == "other":
        return f"{launcher['path']} is the launcher of another MPI"
    return None
