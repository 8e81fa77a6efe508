"""The launcher: the one that started this process, if any, and the one that a user would start ranks with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_pp_progress.tools.job.launch import LaunchError, find_launcher, made_by
from trtllm_pp_progress.tools.job.library import Library
from trtllm_pp_progress.tools.job.role import role

__all__ = ["look_at_launcher"]


def look_at_launcher(environ: Mapping[str, str], library: Library | None) -> dict[str, Any]:
    """Return what the launcher's variables say, which launcher is found here, and what of it cannot be true."""
    own = role(environ)
    found: dict[str, Any] = {
        "said": own and own.said,
        "name": own and own.launcher,
        "rank": own and own.rank,
        "size": own and own.size,
        "unset": own and own.unset,
        "path": None,
        "made_by": None,
        "problem": None,
    }
    try:
        path, version = find_launcher(environ)
        found |= {"path": path, "made_by": made_by(version)}
    except LaunchError:
        pass
    if own is not None and not own.joins:
        found["problem"] = "tasks"
    elif own is not None and own.size == 1:
        found["problem"] = "alone"
    elif own is not None and library is not None and own.cannot_join(library):
        found["problem"] = "mismatch"
    elif own is None and library is not None and found["made_by"] and not library.joins(found["made_by"]):
        found["problem"] = "other"
    return found
