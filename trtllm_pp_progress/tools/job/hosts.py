"""Where the ranks run. A host is what shares memory: names may be the same on two of them, or several on one."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from trtllm_pp_progress.tools.job.ranks import quiet_barrier

__all__ = ["hosts_of_ranks", "listed"]

SHARED_MEMORY, MARK = "/dev/shm", "trtllm-pp-progress-"


def hosts_of_ranks(comm: Any) -> list[str]:
    """Return by rank the host that it runs on, the same word for ranks that share memory and for no others; collective.

    Each rank leaves a mark in /dev/shm and looks whose it finds there; where it can leave none, the hostname decides.
    (MPI's own answer, by COMM_TYPE_SHARED, is that of its settings: with MPICH's MPIR_CVAR_NOLOCAL nobody shares.) The
    word is the hostname; where several hosts have one, followed by the first rank on each.
    """
    with contextlib.ExitStack() as marks:
        mark = ""
        with contextlib.suppress(OSError):
            mark = marks.enter_context(tempfile.NamedTemporaryFile(prefix=MARK, dir=SHARED_MEMORY)).name
        everybody = comm.allgather((socket.gethostname(), mark))
        name = socket.gethostname()
        here = [rank for rank, (other, its) in enumerate(everybody) if (os.path.exists(its) if its else other == name)]
        quiet_barrier(comm)
    found = [(other, first) for (other, _), first in zip(everybody, comm.allgather(min(here)), strict=True)]
    firsts = {name: {first for other, first in found if other == name} for name, _ in found}
    return [name if len(firsts[name]) == 1 else f"{name} (from rank {first})" for name, first in found]


def listed(hosts: Sequence[str], ranks: Iterable[int] | None = None) -> str:
    """Return in words which ranks, of all or of some, run where; `hosts` are by rank."""
    found: dict[str, list[int]] = {}
    for rank in range(len(hosts)) if ranks is None else ranks:
        found.setdefault(hosts[rank], []).append(rank)
    return "; ".join(f"{'/'.join(map(str, those))} on {host}" for host, those in found.items())
