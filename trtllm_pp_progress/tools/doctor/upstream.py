"""What TensorRT-LLM is here: a child imports its executor as a worker would, with whatever way in is turned on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from trtllm_pp_progress.installation.install import CLASS, MODULE, install, installed, uninstall
from trtllm_pp_progress.pyexecutor.shape import recognise
from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.tools.job.child import ask, tell
from trtllm_pp_progress.tools.job.role import without_role

__all__ = ["look_at_upstream", "main"]


def look_at_upstream(timeout_s: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return version, era, verdict, whether a worker started like this is patched, and what is or would be patched."""
    keys = ("era", "action", "reason", "relay_waits", "pumped", "patched", "patches")
    try:
        release: str | None = version("tensorrt_llm")
    except PackageNotFoundError:
        release = None
    found: dict[str, Any] = {"version": release, "state": "absent", "error": None, **dict.fromkeys(keys)}
    if find_spec("tensorrt_llm") is None:
        return found
    answer = ask(__name__, timeout_s, without_role(environ))
    return {**found, "state": answer.state, "error": answer.error, **answer.said}


def main() -> None:
    """Import the executor's module and tell how its class is found: the child's part."""
    try:
        cls = getattr(import_module(MODULE), CLASS)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    patched = installed(cls)
    patches = uninstall(cls) if patched else []
    verdict = recognise(cls)
    if verdict.patch and not patched:
        with install(cls, Settings()):  # a bad variable is a finding of its own, and no reason not to judge the class
            patches = uninstall(cls)
    judged = {"era": verdict.era, "action": verdict.action.value, "reason": verdict.reason}
    tell(**judged, relay_waits=verdict.relay_waits, pumped=verdict.pumped, patched=patched, patches=patches)
