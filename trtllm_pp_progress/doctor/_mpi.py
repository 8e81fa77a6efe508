"""What MPI is here: a child imports it, as one rank alone, with the settings that a rank here would get."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_pp_progress.doctor._child import ask, tell
from trtllm_pp_progress.doctor._ucx import ask_ucx

__all__ = ["examine", "holds_gil", "main", "select"]

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
LAST_WITH_GIL_HELD = (4, 1, 2)  # mpi4py/mpi4py#784, fixed by #789 (2026-09) after this release
VERBOSE = {"OMPI_MCA_pml_base_verbose": "10", "OMPI_MCA_btl_base_verbose": "10", "OMPI_MCA_mtl_base_verbose": "10"}
SELECTED = re.compile(r"select: component (\w+) selected")
BTL = re.compile(r"select: init of component (\w+) returned success")
MESSAGES = {  # what libraries say on stderr, under the name of the finding
    "ucx-not-thread-safe": re.compile(r"UCP worker does not support MPI_THREAD_MULTIPLE", re.I),
    "ucp-worker": re.compile(r"Failed to create UCP worker", re.I),
}


def examine(timeout_s: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return vendor, versions, library, thread level, what is selected and what UCX says; whatever could be had."""
    answer = ask(__name__, timeout_s, {**environ, **VERBOSE})
    said = answer.said
    state = "absent" if said.pop("absent", False) else answer.state
    return {
        "state": state,
        "error": answer.error,
        **{name: said.get(name) for name in ("vendor", "version", "library", "libmpi", "mpi4py", "thread_level")},
        "gil_held_duplicate": holds_gil(said["mpi4py"]) if "mpi4py" in said else None,
        **select(said.get("vendor"), said.get("library"), answer.stderr, environ),
        "messages": sorted(name for name, pattern in MESSAGES.items() if pattern.search(answer.stderr)),
        "ucx": said.get("ucx"),
    }


def holds_gil(version: str) -> bool:
    """Tell whether this mpi4py duplicates a communicator with the GIL held, in its first pickled collective."""
    return tuple(map(int, re.findall(r"\d+", version)[:3])) <= LAST_WITH_GIL_HELD


def select(vendor: str | None, library: str | None, stderr: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the layer that carries messages ("pml ucx", "netmod ofi", ...) and Open MPI's BTLs, as far as known.

    Open MPI says so while it selects; MPICH's device is in its version text.
    """
    chosen = SELECTED.findall(stderr)
    if vendor == "Open MPI":
        return {"layer": f"pml {chosen[-1]}" if chosen else None, "btls": sorted(set(BTL.findall(stderr)))}
    device = re.search(r"Device:\s*\w+:(.+)", library or "")
    if device is None:
        return {"layer": None, "btls": []}
    built = re.split(r"[ ,]+", device[1].strip())
    asked = environ.get("MPIR_CVAR_CH4_NETMOD", "")
    return {"layer": f"netmod {asked if asked in built else built[0]}", "btls": []}


def main() -> None:
    """Import MPI and tell what it is: the child's part."""
    try:
        import mpi4py
    except ImportError as error:
        tell(absent=True, error=str(error))
        sys.exit(1)
    tell(mpi4py=mpi4py.__version__)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        tell(error=" ".join(str(error).split()))
        sys.exit(1)
    vendor, numbers = MPI.get_vendor()
    levels = {getattr(MPI, f"THREAD_{name}"): name for name in LEVELS}
    tell(
        vendor=vendor,
        version=".".join(map(str, numbers)),
        library=MPI.Get_library_version().strip("\0 \n"),
        thread_level=levels[MPI.Query_thread()],
        libmpi=_loaded("libmpi"),
    )
    if ucp := _loaded("libucp"):
        tell(ucx=ask_ucx(ucp))
    # Leaving by the usual way would finalize MPI, which is one more thing that can hang.
    sys.stderr.flush()
    os._exit(0)


def _loaded(name: str) -> str | None:
    """Return the real path of a library that is loaded in this process."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    named = sorted(path for path in paths if re.match(rf"{name}(_abi|ch)?\.so", os.path.basename(path)))
    return os.path.realpath(named[0]) if named else None
