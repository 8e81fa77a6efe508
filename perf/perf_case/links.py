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

import mmap
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from trtllm_pp_progress.host import connect_pipeline

__all__ = ["LINKS", "Link", "LinkError", "connect"]

LINKS = ("shared", "ipc", "nccl")
PIECE = 2048  # rows in one place: upstream's most tokens of a batch in the published case
PLACES = 8


class LinkError(RuntimeError):
    """A neighbour has gone, or a kind of link cannot be had here."""


class Link(Protocol):
    """One direction; `send` on one rank, `receive` on the next."""

    asynchronous = False  # whether both return before the copy is done, in the order of the stream

    def send(self, rows: torch.Tensor) -> None:
        """Hand rows (n, hidden) on; they may be overwritten in stream order afterwards."""

    def receive(self, rows: torch.Tensor) -> None:
        """Fill rows (n, hidden) with the next n."""

    def close(self) -> None:
        """Give up the connection."""


class _Placed:
    """Rows through places in a buffer that both ranks see; subclasses say how a place is written and read."""

    asynchronous = False

    def __init__(self, signal: socket.socket, places: torch.Tensor) -> None:
        self._signal, self._places = signal, places
        self._free = PLACES  # of use to the sender
        self._next = 0

    def send(self, rows: torch.Tensor) -> None:
        for piece in rows.split(PIECE):
            if not self._free:
                self._await()
                self._free += 1
            self._free -= 1
            place = self._take()
            self._write(place, self._places[place, : len(piece)], piece)
            self._tell()

    def receive(self, rows: torch.Tensor) -> None:
        for piece in rows.split(PIECE):
            self._await()
            place = self._take()
            self._read(place, piece, self._places[place, : len(piece)])
            self._tell()

    def _take(self) -> int:
        place, self._next = self._next, (self._next + 1) % PLACES
        return place

    def _await(self) -> None:
        try:
            told = self._signal.recv(1)
        except OSError as error:
            raise LinkError(f"the neighbouring stage has gone: {error}") from None
        if not told:
            raise LinkError("the neighbouring stage has gone")

    def _tell(self) -> None:
        try:
            self._signal.send(b".")
        except OSError as error:
            raise LinkError(f"the neighbouring stage has gone: {error}") from None

    def _write(self, place: int, there: torch.Tensor, rows: torch.Tensor) -> None:
        raise NotImplementedError

    def _read(self, place: int, rows: torch.Tensor, there: torch.Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._signal.close()


class _Shared(_Placed):
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


class _Ipc(_Placed):
    """Through a buffer on the sender's GPU that the receiver maps; events of both order the streams, nobody waits."""

    asynchronous = True

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


class _Nccl:
    """torch.distributed's send and receive with one neighbour."""

    asynchronous = True

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
        return _connect_nccl(comm, device)
    rank, size = comm.Get_rank(), comm.Get_size()
    before, after = connect_pipeline(comm)
    if kind == "ipc":
        return _connect_ipc(comm, before, after, hidden, dtype, device)
    path = ""
    if after is not None:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, path = tempfile.mkstemp(prefix="perf-case-", dir=folder)
        os.close(descriptor)
    paths = comm.allgather(path)
    links = (
        _Shared(before, paths[rank - 1], hidden, dtype, device) if before is not None else None,
        _Shared(after, path, hidden, dtype, device) if after is not None else None,
    )
    comm.Barrier()
    if rank < size - 1:
        Path(path).unlink()  # both have it mapped
    return links


def _connect_ipc(
    comm: Any,
    before: socket.socket | None,
    after: socket.socket | None,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Link | None, Link | None]:
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
        links[0] = _Ipc(before, rebuild(*arguments), opened(offered[rank - 1][1]), free)
    if after is not None:
        assert places is not None
        links[1] = _Ipc(after, places, full, opened(offered[rank + 1][2]))
    comm.Barrier()
    return links[0], links[1]


def _connect_nccl(comm: Any, device: torch.device) -> tuple[Link | None, Link | None]:
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
    before = _Nccl(rank - 1) if rank > 0 else None
    after = _Nccl(rank + 1) if rank < size - 1 else None
    row = torch.zeros(1, 8, device=device)  # the connection is made by the first message: not while tokens are timed
    if before is not None:
        before.receive(row)
    if after is not None:
        after.send(row)
    torch.cuda.synchronize(device)
    comm.Barrier()
    return before, after
