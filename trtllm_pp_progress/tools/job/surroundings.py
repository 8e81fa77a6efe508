"""What around a process keeps MPI from starting in it, or in a worker: variables, limits, memory to share."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping

__all__ = [
    "LITTLE_MEMLOCK",
    "SMALL_SHM",
    "initialization_off",
    "lost_paths",
    "memlock_bytes",
    "pmix_folder_missing",
    "pmix_settings",
    "shm_bytes",
    "suspects",
]

# Where an MPI, or what it is made of, looks for its parts. Each may be left from a module or an image of another build.
PLACES = (
    "OPAL_PREFIX",
    "PMIX_PREFIX",
    "PRTE_PREFIX",
    "I_MPI_ROOT",
    "UCX_MODULE_DIR",
    "FI_PROVIDER_PATH",
    "MPI4PY_LIBMPI",
    "I_MPI_PMI_LIBRARY",
)
# One of PMIx's frameworks alone: it names the components of that framework that may be used.
PMIX_CHOICE = re.compile(
    r"PMIX_MCA_(bfrops|gds|pcompress|plog|pmdl|pnet|preg|prm|psec|psensor|pshmem|psquash|pstrg|ptl)"
)
SMALL_SHM = 64 << 20  # a container's default, in bytes: two ranks with their queues can fill it
LITTLE_MEMLOCK = 1 << 20  # the system's default of old, in bytes: a fabric needs more for its first queue
OFF = ("0", "false", "no", "off", "n", "f")


def lost_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name a place of MPI's parts which is not there."""
    return {name: environ[name] for name in PLACES if environ.get(name) and not os.path.exists(environ[name])}


def pmix_folder_missing(environ: Mapping[str, str]) -> str | None:
    """Return where the PMIx server of the launcher should be met, if that is not there: not mounted, as a rule."""
    folder = environ.get("PMIX_SERVER_TMPDIR")
    return folder if folder and "PMIX_RANK" in environ and not os.path.isdir(folder) else None


def pmix_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of PMIx that were handed on: MPI does not start if a component that they name is missing."""
    return {name: value for name, value in sorted(environ.items()) if PMIX_CHOICE.fullmatch(name)}


def initialization_off(environ: Mapping[str, str]) -> bool:
    """Tell whether mpi4py is told not to start MPI when it is imported."""
    return environ.get("MPI4PY_RC_INITIALIZE", "").strip().lower() in OFF


def memlock_bytes() -> int | None:
    """Return how much memory this process may lock, which fabrics need to; None is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def shm_bytes(folder: str = "/dev/shm") -> int | None:
    """Return how large the memory is that ranks of this host share messages in; None where there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def suspects(environ: Mapping[str, str]) -> str:
    """Return in words what here may have kept MPI from starting, or an empty text."""
    named = {**lost_paths(environ), **pmix_settings(environ)}
    words = [f"{name}={value}" for name, value in named.items()]
    if (limit := memlock_bytes()) is not None and limit <= LITTLE_MEMLOCK:
        words.append(f"a limit of {limit >> 10} KiB on locked memory")
    if (size := shm_bytes()) is not None and size <= SMALL_SHM:
        words.append(f"/dev/shm of {size >> 20} MiB")
    return ", ".join(words)
