"""Rows through shared memory of this machine, pinned where the rows are a GPU's."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch

from case.placed import PIECE, PLACES, LinkError, Placed

__all__ = ["Shared", "connect_shared"]


class Shared(Placed):
    """Through a mapped file; on a GPU the mapping is pinned and every copy waited for."""

    def __init__(self, signal: socket.socket, path: str, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        size = PLACES * PIECE * hidden * dtype.itemsize
        with open(path, "r+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        places = torch.frombuffer(self._map, dtype=dtype).view(PLACES, PIECE, hidden)
        self._cuda = device.type == "cuda"
        if self._cuda:
            code = torch.cuda.cudart().cudaHostRegister(places.data_ptr(), size, 0)  # type: ignore[attr-defined]
            if int(code):
                raise LinkError(f"shared memory could not be pinned: CUDA error {int(code)}")
        super().__init__(signal, places)

    def _write(self, place: int, there: torch.Tensor, rows: torch.Tensor) -> None:
        there.copy_(rows, non_blocking=True)
        self._settle()

    def _read(self, place: int, rows: torch.Tensor, there: torch.Tensor) -> None:
        rows.copy_(there, non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.current_stream().synchronize()


def connect_shared(
    comm: Any,
    before: socket.socket | None,
    after: socket.socket | None,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Shared | None, Shared | None]:
    """Map a file between each two ranks; collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    path = ""
    if after is not None:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, path = tempfile.mkstemp(prefix="perf-case-", dir=folder)
        os.close(descriptor)
    paths = comm.allgather(path)
    links = (
        Shared(before, paths[rank - 1], hidden, dtype, device) if before is not None else None,
        Shared(after, path, hidden, dtype, device) if after is not None else None,
    )
    comm.Barrier()
    if rank < size - 1:
        Path(path).unlink()  # both have it mapped
    return links
