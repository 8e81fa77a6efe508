"""Cores, the native part, and the variables that matter."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from trtllm_pp_progress.driver.library import DriverUnavailableError
from trtllm_pp_progress.driver.library import load as load_library
from trtllm_pp_progress.installation.install import GATE
from trtllm_pp_progress.mpi import cores as _cores
from trtllm_pp_progress.settings.core import SWITCH, Settings, switched_on
from trtllm_pp_progress.settings.schema import PREFIX, SettingsError, load
from trtllm_pp_progress.settings.version import __version__
from trtllm_pp_progress.tools.doctor.single_copy import look_at_single_copy
from trtllm_pp_progress.tools.job.surroundings import lost_paths, memlock_bytes, pmix_folder_missing, shm_bytes

__all__ = ["cores", "environment", "package", "surroundings"]

# The executor's and the relay's thread poll or compute; the native driver wakes while a send is pending.
THREADS = ("executor", "relay", "native driver")
MATTER = re.compile(
    r"TRTLLM_|TLLM_|TRTLLM_PP_PROGRESS$|UCX_|OMPI_MCA_(pml|btl|mtl|opal_common_ucx|osc|orte_|hwloc_base_|rmaps_base_)|MPIR_CVAR_|MPI4PY_|PMIX_MCA_|FI_|MPICH_|"
    r"I_MPI_(FABRICS|OFI|PMI|ROOT)|(OPAL|PMIX|PRTE)_PREFIX$|(CUDA_LAUNCH_BLOCKING|PYTHONPATH|LD_PRELOAD)$"
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
    except DriverUnavailableError as error:
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


def cores(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the cores that a rank like this process has, now and later, and how many threads of it want one."""
    return {**asdict(_cores.cores(environ)), "ranks": _cores.ranks_here(environ), "threads": len(THREADS)}


def surroundings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what around MPI may keep it from starting."""
    return {
        "lost_paths": lost_paths(environ),
        "pmix_folder_missing": pmix_folder_missing(environ),
        "memlock_bytes": memlock_bytes(),
        "shm_bytes": shm_bytes(),
        "single_copy": look_at_single_copy(environ),
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter, without what nobody should read in a report."""
    found = {name: value for name, value in sorted(environ.items()) if MATTER.match(name) or name == SWITCH}
    return {name: "(hidden)" if SECRET.search(name) else value for name, value in found.items()}
