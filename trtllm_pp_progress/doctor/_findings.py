"""What the facts mean and what to do about them: pure functions of the report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from trtllm_pp_progress._settings import PUMP_PERIOD

__all__ = ["EXIT_CODES", "findings", "threshold", "verdict"]

EXIT_CODES = {"fine": 0, "cured": 0, "affected": 1, "unknown": 2}
SIZES = {"": 1, "B": 1, "K": 2**10, "KB": 2**10, "M": 2**20, "MB": 2**20, "G": 2**30, "GB": 2**30}
MEASURE = "measure it under your launcher: mpirun -n 2 trtllm-pp-progress probe"
TURN_ON = "set TRTLLM_PP_PROGRESS=1 where the workers start, or start them through `trtllm-pp-progress run --`"

Finding = tuple[str, str, str, str]  # id, severity, what it means, what to do


def verdict(report: dict[str, Any]) -> tuple[str, str]:
    """Return "fine", "cured", "affected" or "unknown", and why, in a line."""
    mpi, upstream, transport = report["mpi"], report["tensorrt_llm"], report["transport"]
    carrier, parks, level = transport["carrier"], transport["parks"], mpi["thread_level"]
    if report["environment"].get("TLLM_DISABLE_MPI") == "1":
        return "unknown", "TLLM_DISABLE_MPI=1: sends go by torch.distributed, which is left as it is"
    if level is None:
        return "unknown", f"MPI is {mpi['state']}: {mpi['error']}"
    if parks == "no":
        return "fine", f"{carrier}: a message moves although its sender is outside MPI"
    era = f"TensorRT-LLM's era {upstream['era']}"
    if upstream["patched"] and level != "MULTIPLE":
        return "affected", f"{carrier}: MPI runs with THREAD_{level}, so the relay thread must not drive"
    if upstream["patched"] and _pump_off(report):
        return "affected", f"{carrier}: {PUMP_PERIOD} turns the pump of {era} off, and our drive with it"
    if upstream["patched"]:
        return "cured", f"{carrier}: the relay of {era} is patched"
    if upstream["era"] in ("A1", "A2"):
        return "fine", f"{era} waits for its sends: {upstream['reason']}"
    if upstream["action"] == "stand down":
        return "unknown", f"{carrier}: {era} is left as it is: {upstream['reason']}"
    if upstream["state"] not in ("ok", "absent"):
        return "unknown", f"{carrier}: TensorRT-LLM {upstream['state']}: {upstream['error']}"
    if parks == "unknown":
        return "unknown", f"{carrier}: whether it parks large messages was never measured"
    if upstream["state"] == "absent":
        return "affected", f"{carrier} parks large messages whose sender is outside MPI; TensorRT-LLM is not here"
    return "affected", f"{carrier} parks large messages, and the relay of {era} is not patched"


def findings(report: dict[str, Any]) -> list[dict[str, str]]:
    """Return what is worth knowing, the worst first: id, severity (error, warning, info), what it means, what to do."""
    rules = (_mpi, _transport, _ucx, _upstream, _package, _machine)
    found = [finding for rule in rules for finding in rule(report)]
    found.sort(key=lambda finding: ("error", "warning", "info").index(finding[1]))
    return [dict(zip(("id", "severity", "means", "do"), finding, strict=True)) for finding in found]


def threshold(text: str) -> dict[str, float | None]:
    """Return bytes by scope out of a form of UCX_RNDV_THRESH: None for auto, infinity for inf; ValueError for no form.

    Forms: auto, inf, 0, 8192, 8k, 8KB, intra:auto,inter:64k.
    """
    values: dict[str, float | None] = {}
    for part in text.strip().split(","):
        scope, _, size = part.rpartition(":")
        match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", size.strip().upper())
        if size.strip().lower() == "auto":
            values[scope or "all"] = None
        elif size.strip().lower() == "inf":
            values[scope or "all"] = math.inf
        elif match:
            values[scope or "all"] = float(match[1]) * SIZES[match[2]]
        else:
            raise ValueError(f"{text!r} is no size: valid ones are like auto, inf, 0, 8192, 8k, intra:auto,inter:64k")
    return values


def _pump_off(report: dict[str, Any]) -> bool:
    """Tell whether upstream's pump is turned off, for then the relay thread of era H keeps out of MPI."""
    try:
        period = float(report["environment"].get(PUMP_PERIOD, "1"))
    except ValueError:
        return False  # upstream takes its default
    return report["tensorrt_llm"]["era"] == "H" and math.isfinite(period) and period <= 0


def _remedy(report: dict[str, Any]) -> tuple[str, str]:
    """Return how grave a transport that parks is for this TensorRT-LLM, and what to do about it."""
    upstream = report["tensorrt_llm"]
    if upstream["patched"]:
        return "info", "nothing more: the relay is patched"
    if upstream["action"] == "stand down":
        return "info", "nothing of ours: the relay of this TensorRT-LLM is left as it is"
    return "warning", TURN_ON


def _mpi(report: dict[str, Any]) -> Iterator[Finding]:
    mpi = report["mpi"]
    if mpi["state"] == "absent":
        yield "mpi-absent", "error", "mpi4py is not installed here", "run the doctor in the workers' environment"
    elif mpi["state"] == "timed out":
        yield (
            "mpi-timeout",
            "error",
            f"importing MPI hangs ({mpi['error']})",
            "look for a mix of two MPIs (LD_LIBRARY_PATH, conda) or a launcher's variables of another job",
        )
    elif mpi["state"] != "ok" and mpi["thread_level"] is None:
        yield (
            f"mpi-{mpi['state']}",
            "error",
            f"MPI cannot be imported: {mpi['error']}",
            "see that LD_LIBRARY_PATH leads to the libmpi that mpi4py was built for",
        )
    elif mpi["state"] != "ok":
        yield "ucx-unasked", "warning", f"asking UCX failed: {mpi['error']}", "none: the rest of this report holds"
    if mpi["thread_level"] not in (None, "MULTIPLE"):
        yield (
            "thread-level",
            "error",
            f"MPI runs with THREAD_{mpi['thread_level']}: two threads must not be in MPI, so nothing of ours drives",
            "start mpi4py with THREAD_MULTIPLE (its default: see MPI4PY_RC_THREAD_LEVEL) and an MPI built for it",
        )
    if mpi["gil_held_duplicate"]:
        yield (
            "mpi4py-gil",
            "warning",
            f"mpi4py {mpi['mpi4py']} duplicates a communicator with the GIL held in its first pickled collective "
            "(mpi4py/mpi4py#784): a late rank then stops every thread",
            "make such collectives once on the main thread before others start, or use a release after 4.1.2",
        )


def _transport(report: dict[str, Any]) -> Iterator[Finding]:
    transport, known = report["transport"], report["mpi"]["thread_level"]
    carrier = transport["carrier"]
    if transport["parks"] in ("yes", "sometimes"):
        severity, remedy = _remedy(report)
        how = "moves only while its sender is inside MPI" if transport["parks"] == "yes" else "is parked now and then"
        yield "transport-parks", severity, f"{carrier}: a large message {how}", remedy
    elif transport["parks"] == "unknown" and known:
        yield "transport-unknown", "warning", f"{carrier}: whether it parks is not known", MEASURE
    ucx = transport["ucx"] or {}
    if transport["layer"] not in (None, "pml ucx", "netmod ucx") and "UCX_TLS" in report["environment"]:
        yield (
            "ucx-unused",
            "warning",
            f"UCX {ucx.get('version', '')} is not in use: messages go by {transport['layer']}, UCX_TLS changes nothing",
            "for UCX: --mca pml ucx; without InfiniBand also opal_common_ucx_tls any and opal_common_ucx_devices any",
        )


def _ucx(report: dict[str, Any]) -> Iterator[Finding]:
    ucx, messages = report["transport"]["ucx"] or {}, report["mpi"]["messages"]
    if "ucx-not-thread-safe" in messages or ucx.get("thread_safe") is False:
        yield (
            "ucx-not-thread-safe",
            "warning",
            "UCX was built without thread support: Open MPI quietly takes another layer under THREAD_MULTIPLE",
            "use a UCX built with --enable-mt",
        )
    if "ucp-worker" in messages:
        yield "ucp-worker", "error", "UCX could not create a worker: the fabric or its limits", "check the fabric"
    text = ucx.get("rndv_thresh") or report["environment"].get("UCX_RNDV_THRESH") or "auto"
    try:
        raised = [size for size in threshold(text).values() if size is not None]
    except ValueError as error:
        yield "rndv-threshold", "error", f"UCX_RNDV_THRESH: {error}", "correct it"
    else:
        if raised:
            yield (
                "rndv-threshold",
                "info",
                f"UCX_RNDV_THRESH is {text}: raising it hides the stall for messages below it, it does not cure it",
                "leave it at auto once the patch is on",
            )


def _upstream(report: dict[str, Any]) -> Iterator[Finding]:
    upstream = report["tensorrt_llm"]
    if upstream["state"] == "absent":
        yield "upstream-absent", "info", "TensorRT-LLM is not installed here", "run the doctor where the workers run"
    elif upstream["state"] != "ok":
        yield (
            "upstream-failed",
            "error",
            f"TensorRT-LLM's executor cannot be imported: {upstream['error']}",
            "run the doctor on a worker's node, with a longer --timeout if it was too slow",
        )
    elif upstream["patched"]:
        yield "upstream-patched", "info", f"a worker started like this is patched (era {upstream['era']})", "nothing"
    elif upstream["action"] != "stand down":
        yield "upstream-unpatched", "warning", f"era {upstream['era']}: {upstream['reason']}", TURN_ON
    else:
        yield "upstream-left", "info", f"era {upstream['era']}, left as it is: {upstream['reason']}", "nothing"
    if _pump_off(report):
        yield (
            "pump-off",
            "warning",
            f"{PUMP_PERIOD} is at most 0: in era H an idle relay thread then keeps out of MPI, patched or not",
            "leave it unset",
        )


def _package(report: dict[str, Any]) -> Iterator[Finding]:
    package = report["package"]
    for problem in package["problems"]:
        yield "setting", "error", problem, "correct or remove it: automatic ways in stand down for a bad value"
    if package["switch"] is False:
        yield "switch-off", "info", "TRTLLM_PP_PROGRESS is 0: the automatic ways in are off", TURN_ON
    if not package["gate"]:
        yield (
            "no-gate",
            "info",
            "the .pth of this package is not active in this Python (as in a plain folder on PYTHONPATH)",
            "install it with pip, use the launcher, or import trtllm_pp_progress.auto in the workers",
        )
    if not package["native"]:
        yield (
            "native-missing",
            "warning",
            f"{package['native_error']}; polls cannot cover a window in which another thread holds the GIL",
            "install with a C compiler",
        )


def _machine(report: dict[str, Any]) -> Iterator[Finding]:
    cores, variables = report["cores"], report["environment"]
    allowed = min(cores["allowed"], cores["quota"] or math.inf)
    if allowed < cores["threads"]:
        yield (
            "cores",
            "warning",
            f"a rank like this process may use {allowed:g} cores for {cores['threads']} busy threads",
            "bind ranks wider (Open MPI: --bind-to none, or --map-by slot:PE=4)",
        )
    asynchronous = any(variables.get(f"{name}_PP_REQ_SEND_ASYNC") == "1" for name in ("TRTLLM", "TLLM"))
    if asynchronous and variables.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield (
            "launch-blocking",
            "warning",
            "CUDA_LAUNCH_BLOCKING=1 with asynchronous request sends deadlocks unpatched (NVIDIA/TensorRT-LLM#10665)",
            "use one of the two",
        )
    if variables.get("TLLM_DISABLE_MPI") == "1":
        yield "mpi-disabled", "info", "TLLM_DISABLE_MPI=1: sends go by torch.distributed, not by MPI", "nothing"
    if variables.get("MPIR_CVAR_ASYNC_PROGRESS", "0") not in ("", "0"):
        yield "async-progress", "info", "MPICH's own progress thread is on; it competes for the lock", "measure without"
