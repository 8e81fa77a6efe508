"""Describe what is measured on."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from typing import Any

from trtllm_pp_progress.settings.version import __version__
from trtllm_pp_progress.tools.job.hosts import listed
from trtllm_pp_progress.tools.job.library import described
from trtllm_pp_progress.tools.job.surroundings import suspects

__all__ = ["environment"]

# They change what is measured. The first three are always reported, the others where they are set.
VARIABLES = ("UCX_TLS", "UCX_RNDV_THRESH", "MPIR_CVAR_ASYNC_PROGRESS")
MORE = re.compile(
    r"UCX_|OMPI_MCA_(pml|btl|mtl|opal_common_ucx|osc)|MPIR_CVAR_(CH4_NETMOD|NOLOCAL|CH4_OFI)|FI_|I_MPI_(FABRICS|OFI)|PSM"
)


def environment(transport: str, hosts: Sequence[str] = ()) -> dict[str, Any]:
    """Describe what was measured on, and which ranks where if `hosts`, by rank, are several; imports mpi4py."""
    import mpi4py
    from mpi4py import MPI

    return {
        "trtllm_pp_progress": __version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": described(MPI).name,
        "mpi4py": mpi4py.__version__,
        "thread_level": MPI.Query_thread(),
        "transport": transport,
        **({"ranks": listed(hosts)} if len(set(hosts)) > 1 else {}),
        **{name: os.environ.get(name, "") for name in VARIABLES},
        **{name: value for name, value in sorted(os.environ.items()) if MORE.match(name)},
        **({"suspect": found} if (found := suspects(os.environ)) else {}),
    }
