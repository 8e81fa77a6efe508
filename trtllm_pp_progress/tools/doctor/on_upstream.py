"""Findings about TensorRT-LLM and this package: is a worker patched, and does the way in reach it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trtllm_pp_progress.settings.core import PUMP_PERIOD
from trtllm_pp_progress.tools.doctor.kinds import Finding, Kind

__all__ = ["TURN_ON", "on_upstream", "pump_off"]

TURN_ON = "set TRTLLM_PP_PROGRESS=1 where the workers start, or start them through `trtllm-pp-progress run --`"

ABSENT = Kind(
    "upstream-absent",
    "info",
    "a Python without TensorRT-LLM",
    "TensorRT-LLM is not installed here",
    "run the doctor where the workers run",
)
FAILED = Kind(
    "upstream-failed",
    "error",
    "a host without a GPU or its driver; a slow file system",
    "TensorRT-LLM's executor cannot be imported: {error}",
    "run the doctor on a worker's node, with a longer --timeout if it was too slow",
)
PATCHED = Kind(
    "upstream-patched", "info", "the patch is on", "a worker started like this is patched (era {era})", "nothing"
)
UNPATCHED = Kind("upstream-unpatched", "warning", "the patch is not on", "era {era}: {reason}", TURN_ON)
LEFT = Kind(
    "upstream-left",
    "info",
    "an era that needs no patch, or a shape that is not known",
    "era {era}, left as it is: {reason}",
    "nothing",
)
PUMP_OFF = Kind(
    "pump-off",
    "warning",
    "eras H and I with the pump turned off",
    f"{PUMP_PERIOD} is at most 0: in era {{era}} an idle relay thread then keeps out of MPI, patched or not",
    "leave it unset",
)
SETTING = Kind(
    "setting",
    "error",
    "a setting that is not valid",
    "{problem}",
    "correct or remove it: automatic ways in stand down for a bad value",
)
SWITCHED_OFF = Kind(
    "switch-off", "info", "TRTLLM_PP_PROGRESS=0", "TRTLLM_PP_PROGRESS is 0: the automatic ways in are off", TURN_ON
)
NO_GATE = Kind(
    "no-gate",
    "info",
    "a plain folder on PYTHONPATH, pip install --target, python -S",
    "the .pth of this package is not active in this Python (as in a plain folder on PYTHONPATH)",
    "install it with pip, use `trtllm-pp-progress run`, or import trtllm_pp_progress.auto in the workers",
)
NO_NATIVE = Kind(
    "native-missing",
    "warning",
    "no C compiler when this was installed",
    "{error}; polls cannot cover a window in which another thread holds the GIL",
    "install with a C compiler",
)


def on_upstream(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield what TensorRT-LLM's class, the switch and the way in mean."""
    upstream, package = report["tensorrt_llm"], report["package"]
    if upstream["state"] == "absent":
        yield ABSENT.found()
    elif upstream["state"] != "ok":
        yield FAILED.found(error=upstream["error"])
    elif upstream["patched"]:
        yield PATCHED.found(era=upstream["era"])
    elif upstream["action"] != "stand down":
        yield UNPATCHED.found(era=upstream["era"], reason=upstream["reason"])
    else:
        yield LEFT.found(era=upstream["era"], reason=upstream["reason"])
    if pump_off(report):
        yield PUMP_OFF.found(era=upstream["era"])
    for problem in package["problems"]:
        yield SETTING.found(problem=problem)
    if package["switch"] is False:
        yield SWITCHED_OFF.found()
    if not package["gate"]:
        yield NO_GATE.found()
    if not package["native"]:
        yield NO_NATIVE.found(error=package["native_error"])


def pump_off(report: dict[str, Any]) -> bool:
    """Tell whether the relay has a pump of upstream's that is turned off, for then its thread keeps out of MPI."""
    try:
        period = float(report["environment"].get(PUMP_PERIOD, "1"))
    except ValueError:
        return False  # upstream takes its default
    return bool(report["tensorrt_llm"]["pumped"]) and math.isfinite(period) and period <= 0
