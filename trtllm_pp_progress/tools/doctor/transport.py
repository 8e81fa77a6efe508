"""Which transport carries a message within a node and between nodes, and whether it parks large ones.

*Parked*: not moving while the sender is outside MPI. The table's answers were measured (perf/results), or reported
where the source is named. It can be wrong for a release, a scheme or a size: what is measured on this host goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["PARKS", "judge"]

# From the transport that is preferred to the one that is not. "sometimes": the receiver copies, but the rendezvous may
# wait for the sender.
FABRICS = ("rc_mlx5", "dc_mlx5", "ud_mlx5", "rc_verbs", "ud_verbs", "srd", "ugni_rdma", "gga_mlx5")
SINGLE_COPY = ("xpmem", "cma", "knem", "smcuda", "sm", "vader")
SHARED = ("posix", "sysv")
PARKS = {
    **dict.fromkeys(FABRICS, "unknown"),
    **dict.fromkeys(SINGLE_COPY, "sometimes"),
    **dict.fromkeys(SHARED, "no"),
    "tcp": "yes",  # UCX: measured; Open MPI's BTL: open-mpi/ompi#8498
}
WORST_FIRST = ("yes", "sometimes", "unknown", "no")


def judge(
    layer: str | None,
    btls: Sequence[str],
    ucx: dict[str, Any] | None,
    provider: str | None = None,
    measured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the transports that were found, which of them is used where, and whether large messages are parked.

    What two ranks of this host have `measured` counts for within the node, the table for what was not measured.
    """
    over_ucx = layer in ("pml ucx", "netmod ucx")
    found = list(((ucx or {}).get("found") or []) if over_ucx else btls)
    within = _first([*SINGLE_COPY, *SHARED, *FABRICS, "tcp"], found)
    between = _first([*FABRICS, "tcp"], found)
    if layer is not None and (provider is not None or "ofi" in layer):
        between = f"libfabric {provider or ''}".strip()  # of which nothing was measured
    if layer == "netmod ucx":
        within = None  # MPICH's own shared memory, unless MPIR_CVAR_NOLOCAL is set
    here, there = _parks(within), _parks(between)
    if measured is not None:
        here = "yes" if measured["verdict"] == "park" else "no"
    parks = next((word for word in WORST_FIRST if word in (here, there)), "unknown")
    used = [name for name in (within, between) if name is not None]
    return {
        "layer": layer,
        "provider": provider,
        "found": found,
        "within_node": within,
        "between_nodes": between,
        "parks_within_node": here,
        "parks_between_nodes": there,
        "parks": parks,
        "source": "measured" if measured is not None and here == parks else "table",
        "carrier": f"UCX over {' and '.join(dict.fromkeys(used))}" if over_ucx and used else _named(layer, used),
    }


def _parks(name: str | None) -> str | None:
    return None if name is None else PARKS.get(name, "unknown")


def _first(preferred: Sequence[str], found: Sequence[str]) -> str | None:
    return next((name for name in preferred if name in found), None)


def _named(layer: str | None, used: Sequence[str]) -> str:
    if layer is None:
        return "unknown"
    return f"{layer} over {' and '.join(dict.fromkeys(used))}" if used else layer
