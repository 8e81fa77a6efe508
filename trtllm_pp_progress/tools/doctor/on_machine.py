"""Findings about the host: cores and masks, and settings of others that matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trtllm_pp_progress.mpi.cores import AFFINITY
from trtllm_pp_progress.tools.doctor.kinds import Finding, Kind

__all__ = ["on_machine"]

CORES = Kind(
    "cores",
    "warning",
    "a rank bound to a core or two; a small container",
    "a rank like this process may use {cores:g} cores for {threads} busy threads ({why})",
    "bind ranks wider (Open MPI: --bind-to none, or --map-by slot:PE=4; srun: --cpu-bind=none, -c; I_MPI_PIN=0), or "
    "raise the container's CPU limit",
)
MASK = Kind(
    "mask-cleared",
    "info",
    "a narrow mask, and TLLM_NUMA_AWARE_WORKER_AFFINITY not set",
    "this process may use {allowed} of {online} cores, but TensorRT-LLM clears a mask that it did not set, of its main "
    "thread or of all, by release: a worker may have more cores than this",
    f"{AFFINITY}=0 keeps the mask, 1 takes the cores near the GPU",
)
BLOCKING = Kind(
    "launch-blocking",
    "warning",
    "CUDA_LAUNCH_BLOCKING=1 with asynchronous request sends",
    "CUDA_LAUNCH_BLOCKING=1 with asynchronous request sends deadlocks unpatched (NVIDIA/TensorRT-LLM#10665)",
    "use one of the two",
)
NO_MPI = Kind(
    "mpi-disabled",
    "info",
    "TLLM_DISABLE_MPI=1 (Ray)",
    "TLLM_DISABLE_MPI=1: sends go by torch.distributed, not by MPI",
    "nothing",
)
ASYNC = Kind(
    "async-progress",
    "info",
    "MPICH with MPIR_CVAR_ASYNC_PROGRESS",
    "MPICH's own progress thread is on; it competes for the lock",
    "measure without",
)


def on_machine(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield what cores and the settings of others mean."""
    cores, variables = report["cores"], report["environment"]
    shared = math.inf if cores["quota"] is None else cores["quota"] / cores["ranks"]
    own = min(cores["allowed"], shared)
    if own < cores["threads"]:
        why = "its mask" if cores["allowed"] <= shared else f"a quota of {cores['quota']:g} for {cores['ranks']} ranks"
        yield CORES.found(cores=own, threads=cores["threads"], why=why)
    if cores["later"] is not None and cores["later"] > cores["allowed"]:
        yield MASK.found(allowed=cores["allowed"], online=cores["online"])
    asynchronous = any(variables.get(f"{name}_PP_REQ_SEND_ASYNC") == "1" for name in ("TRTLLM", "TLLM"))
    if asynchronous and variables.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield BLOCKING.found()
    if variables.get("TLLM_DISABLE_MPI") == "1":
        yield NO_MPI.found()
    if variables.get("MPIR_CVAR_ASYNC_PROGRESS", "0") not in ("", "0"):
        yield ASYNC.found()
