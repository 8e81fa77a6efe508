"""Cores, the native part, and the variables that matter."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trtllm_pp_progress import Settings, SettingsError, __version__
from trtllm_pp_progress._install import GATE
from trtllm_pp_progress._settings import PREFIX, SWITCH, load, switched_on
from trtllm_pp_progress._understudy import UnderstudyUnavailable, load_library

__all__ = ["cores", "environment", "package", "quota"]

# The executor's and the relay's thread poll or compute; the native understudy wakes while a send is pending.
THREADS = ("executor", "relay", "understudy")
MATTER = re.compile(
    r"TRTLLM_|TLLM_|TRTLLM_PP_PROGRESS$|UCX_|OMPI_MCA_(pml|btl|mtl|opal_common_ucx|osc)|MPIR_CVAR_|MPI4PY_|"
    r"(CUDA_LAUNCH_BLOCKING|PYTHONPATH)$"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")  # as in TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY
VLLM = PREFIX + "VLLM_"  # the receive policy reads these itself


def package(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this package is, how it is set, and whether it is turned on."""
    problems = []
    switch, settings = None, None
    try:
        switch = switched_on(environ)
    except SettingsError as error:
        problems.append(str(error))
    try:
        settings = asdict(load(Settings, environ))
    except SettingsError as error:
        problems.append(str(error))
    valid = [PREFIX + field.name.upper() for field in fields(Settings)]
    problems += [
        f"{name} is no setting: valid ones are {', '.join(valid)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in valid and not name.startswith(VLLM)
    ]
    try:
        load_library()
        native = None
    except UnderstudyUnavailable as error:
        native = str(error)
    return {
        "version": __version__,
        "python": platform.python_version(),
        "switch": switch,
        "settings": settings,
        "problems": problems,
        "gate": GATE in sys.modules,
        "native": native is None,
        "native_error": native,
    }


def cores(environ: Mapping[str, str], cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> dict[str, Any]:
    """Return the cores that this process may use, as a rank would, and the threads that a rank keeps busy at times."""
    return {"allowed": len(os.sched_getaffinity(0)), "quota": quota(cgroup), "threads": len(THREADS)}


def quota(cgroup: Path) -> float | None:
    """Return the cores that a container's quota allows, or None where there is none."""
    try:
        limit, period = cgroup.read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter, without what nobody should read in a report."""
    found = {name: value for name, value in sorted(environ.items()) if MATTER.match(name) or name == SWITCH}
    return {name: "(hidden)" if SECRET.search(name) else value for name, value in found.items()}
