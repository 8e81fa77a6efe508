"""Which transport carries a message within a node and between nodes, and whether it parks large ones.

*Parked*: not moving while the sender is outside MPI. The answers are measured (perf/README.md), or reported where the
source is named, and unknown otherwise: measure with `bench`.
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


def judge(layer: str | None, btls: Sequence[str], ucx: dict[str, Any] | None) -> dict[str, Any]:
    """Return the transports that were found, which of them is used where, and whether large messages are parked."""
    over_ucx = layer in ("pml ucx", "netmod ucx")
    found = list(((ucx or {}).get("found") or []) if over_ucx else btls)
    within = _first([*SINGLE_COPY, *SHARED, *FABRICS, "tcp"], found)
    between = _first([*FABRICS, "tcp"], found)
    if layer == "netmod ucx":
        within = None  # MPICH's own shared memory, unless MPIR_CVAR_NOLOCAL is set
    used = [name for name in (within, between) if name is not None]
    parks = [PARKS[name] for name in used] or ["unknown"]
    return {
        "layer": layer,
        "found": found,
        "within_node": within,
        "between_nodes": between,
        "parks": next(word for word in WORST_FIRST if word in parks),
        "carrier": f"UCX over {' and '.join(dict.fromkeys(used))}" if over_ucx and used else _named(layer, used),
    }


def _first(preferred: Sequence[str], found: Sequence[str]) -> str | None:
    return next((name for name in preferred if name in found), None)


def _named(layer: str | None, used: Sequence[str]) -> str:
    if layer is None:
        return "unknown"
    return f"{layer} over {' and '.join(dict.fromkeys(used))}" if used else layer
