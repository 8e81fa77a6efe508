"""What ranks of a tool do together."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["quiet_barrier"]

NAP_S = 0.005


def quiet_barrier(comm: Any) -> None:
    """Wait for all ranks, mostly asleep: a barrier that spins would take the cores of those that measure."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)
