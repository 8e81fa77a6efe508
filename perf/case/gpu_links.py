"""Rows from GPU to GPU: through CUDA IPC where ranks share one, by NCCL where each has its own."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed

from case.placed import PIECE, PLACES, Link, LinkError, Placed

__all__ = ["Ipc", "Nccl", "connect_ipc", "connect_nccl"]


class Ipc(Placed):
    """Through a buffer on the sender's GPU that the receiver maps; events of both order the streams, nobody waits."""

    def __init__(self, signal: socket.socket, places: torch.Tensor, full: list[Any], free: list[Any]) -> None:
        super().__init__(signal, places)
        self._full, self._freed = full, free

    def _write(self, place: int, there: torch.Tensor, rows: torch.Tensor) -> None:
        self._freed[place].wait()  # of the current stream; an event never recorded is over
        there.copy_(rows, non_blocking=True)
        self._full[place].record()

    def _read(self, place: int, rows: torch.Tensor, there: torch.Tensor) -> None:
        self._full[place].wait()
        rows.copy_(there, non_blocking=True)
        self._freed[place].record()


class Nccl:
    """torch.distributed's send and receive with one neighbour."""

    in_stream_order = True

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def send(self, rows: torch.Tensor) -> None:
        torch.distributed.send(rows.contiguous(), self._peer)

    def receive(self, rows: torch.Tensor) -> None:
        torch.distributed.recv(rows, self._peer)

    def close(self) -> None:
        """End the process group, once."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def connect_ipc(
    comm: Any,
    before: socket.socket | None,
    after: socket.socket | None,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Link | None, Link | None]:
    """Open buffer and events of each neighbour; collective."""
    from torch.multiprocessing.reductions import reduce_tensor

    def events() -> list[Any]:
        return [torch.cuda.Event(interprocess=True) for _ in range(PLACES)]

    def opened(handles: list[bytes]) -> list[Any]:
        return [torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]

    rank = comm.Get_rank()
    full, free = events(), events()
    places = torch.empty(PLACES, PIECE, hidden, dtype=dtype, device=device) if after is not None else None
    exported = reduce_tensor(places) if places is not None else None
    offered = comm.allgather((exported, [e.ipc_handle() for e in full], [e.ipc_handle() for e in free]))
    links: list[Link | None] = [None, None]
    if before is not None:
        rebuild, arguments = offered[rank - 1][0]
        links[0] = Ipc(before, rebuild(*arguments), opened(offered[rank - 1][1]), free)
    if after is not None:
        assert places is not None
        links[1] = Ipc(after, places, full, opened(offered[rank + 1][2]))
    comm.Barrier()
    return links[0], links[1]


def connect_nccl(comm: Any, device: torch.device) -> tuple[Link | None, Link | None]:
    """Make the process group and its connections; collective. LinkError where ranks share a GPU."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if len(set(comm.allgather((socket.gethostname(), device.index)))) < size:
        raise LinkError("link 'nccl' needs a GPU for each rank: ranks that share one use ipc or shared")
    if not torch.distributed.is_initialized():
        store = (
            torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        )
        port = comm.bcast(store.port if store is not None else None)
        if store is None:
            store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    before = Nccl(rank - 1) if rank > 0 else None
    after = Nccl(rank + 1) if rank < size - 1 else None
    row = torch.zeros(1, 8, device=device)  # the connection is made by the first message: not while tokens are timed
    if before is not None:
        before.receive(row)
    if after is not None:
        after.send(row)
    torch.cuda.synchronize(device)
    comm.Barrier()
    return before, after
