"""Activations between neighbouring stages, outside MPI: shared memory, CUDA IPC, or NCCL.

A link is one direction between two ranks; `connect` returns the two of a rank. Rows arrive in the order they were sent.

| link | copies | who waits |
| --- | --- | --- |
| shared | through memory of this machine, pinned for a GPU | the sender for its GPU, then the receiver for a byte |
| ipc | on the GPU, through a buffer of the sender that the receiver maps | the receiver's stream, after a byte |
| nccl | by NCCL, a GPU a rank | the receiver's stream |

shared and ipc have a few places of `PIECE` rows each; a byte over a socket says that one is full, another that it is
free again. Their waits are for the stage's device thread, never for the executor thread.
"""

from __future__ import annotations

from typing import Any

import torch

from case.gpu_links import connect_ipc, connect_nccl
from case.placed import Link, LinkError
from case.shared import connect_shared
from trtllm_pp_progress.tools.host import connect_pipeline

__all__ = ["LINKS", "Link", "LinkError", "connect"]

LINKS = ("shared", "ipc", "nccl")


def connect(
    kind: str, comm: Any, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[Link | None, Link | None]:
    """Connect each rank with the previous and the next one; collective, on the main thread. Returns (before, after).

    The first rank has no before, the last no after. Raises LinkError for a kind that cannot be had.
    """
    if kind not in LINKS:
        raise LinkError(f"unknown link {kind!r}: valid ones are {', '.join(LINKS)}")
    if kind != "shared" and device.type != "cuda":
        raise LinkError(f"link {kind!r} needs a GPU: on a CPU use shared")
    if kind == "nccl":
        return connect_nccl(comm, device)
    through = connect_ipc if kind == "ipc" else connect_shared
    return through(comm, *connect_pipeline(comm), hidden, dtype, device)
