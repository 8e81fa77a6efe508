"""Which layer of an MPI carries messages, as far as it says so while it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["VERBOSE", "select"]

# Each MPI heeds its own: Open MPI, MPICH, Intel MPI.
VERBOSE = {
    "OMPI_MCA_pml_base_verbose": "10",
    "OMPI_MCA_btl_base_verbose": "10",
    "OMPI_MCA_mtl_base_verbose": "10",
    "MPIR_CVAR_DEBUG_SUMMARY": "1",
    "I_MPI_DEBUG": "4",
}
SELECTED = re.compile(r"select: component (\w+) selected")
BTL = re.compile(r"select: init of component (\w+) returned success")
PROVIDER = re.compile(r"(?:libfabric provider|mtl:ofi:provider):\s*([\w;.-]+)")


def select(vendor: str | None, library: str | None, printed: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the layer ("pml ucx", "netmod ofi", "fabrics shm:ofi", ...), Open MPI's BTLs, and libfabric's provider.

    Open MPI says so while it selects; MPICH's device is in its version text; Intel MPI takes a variable.
    """
    chosen, provider = SELECTED.findall(printed), PROVIDER.search(printed)
    found: dict[str, Any] = {"layer": None, "btls": [], "provider": provider and provider[1]}
    if vendor == "Open MPI":
        layer = f"pml {chosen[-1]}" if chosen else None
        return found | {"layer": layer, "btls": sorted(set(BTL.findall(printed)))}
    if vendor == "Intel MPI":
        return found | {"layer": f"fabrics {environ.get('I_MPI_FABRICS') or 'shm:ofi'}"}
    device = re.search(r"Device:\s*\w+:(.+)", library or "")
    if device is None:
        return found
    built = re.split(r"[ ,]+", device[1].strip())
    asked = environ.get("MPIR_CVAR_CH4_NETMOD", "")
    return found | {"layer": f"netmod {asked if asked in built else built[0]}"}
