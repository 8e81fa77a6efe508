"""Put everything together: the report of the doctor as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trtllm_pp_progress.doctor import _machine, _mpi, _upstream
from trtllm_pp_progress.doctor._findings import findings, verdict
from trtllm_pp_progress.doctor._transport import judge

__all__ = ["collect"]

SCHEMA = 1


def collect(timeout_s: float = 120.0, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the report: what is here, what it means, what to do. Its keys are listed in docs/doctor.md.

    MPI and TensorRT-LLM are imported by children that get `timeout_s` seconds each; nothing they do can end or hang
    this process. Run it as the workers are run: same user, same variables, same limits.
    """
    environ = dict(os.environ if environ is None else environ)
    mpi = _mpi.examine(timeout_s, environ)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "package": _machine.package(environ),
        "tensorrt_llm": _upstream.examine(timeout_s, environ),
        "mpi": {name: value for name, value in mpi.items() if name not in ("layer", "btls", "ucx")},
        "transport": {**judge(mpi["layer"], mpi["btls"], mpi["ucx"]), "ucx": mpi["ucx"]},
        "cores": _machine.cores(environ),
        "environment": _machine.environment(environ),
    }
    word, reason = verdict(report)
    return {**report, "verdict": word, "reason": reason, "findings": findings(report)}
