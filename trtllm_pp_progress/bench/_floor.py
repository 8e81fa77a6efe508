"""The floor: a plain ping-pong of the same bytes in the same run, which no relay can be faster than."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from trtllm_pp_progress.bench._rows import Floor, quantile

__all__ = ["floor", "quiet_barrier"]

WARMUP, ROUNDS, MAX_S = 5, 300, 1.0
NAP_S = 0.005


def quiet_barrier(comm: Any) -> None:
    """Wait for all ranks, mostly asleep: a barrier that spins would take the cores of those that measure."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)


def floor(comm: Any, payload_bytes: int) -> Floor | None:
    """Play ping-pong between ranks 0 and 1, both inside MPI all the time; collective, returns on rank 0 only."""
    rank = comm.Get_rank()
    result = None
    if rank < 2:
        buffers, objects = _rounds(comm, payload_bytes, rank, _buffers), _rounds(comm, payload_bytes, rank, _objects)
        if rank == 0:
            result = Floor(
                payload_bytes,
                buffers_ms_p50=quantile(buffers, 0.5),
                buffers_ms_p99=quantile(buffers, 0.99),
                pkl5_ms_p50=quantile(objects, 0.5),
                pkl5_ms_p99=quantile(objects, 0.99),
                rounds=[len(buffers), len(objects)],
            )
    quiet_barrier(comm)
    return result


def _rounds(comm: Any, payload_bytes: int, rank: int, make: Callable[..., Callable[[], None]]) -> list[float]:
    trip, trips = make(comm, payload_bytes, rank), list[float]()
    ends = time.perf_counter() + MAX_S
    for turn in range(WARMUP + ROUNDS):
        started = time.perf_counter()
        trip()
        if turn >= WARMUP:
            trips.append(round((time.perf_counter() - started) / 2 * 1e3, 4))
        # Rank 0 decides, and says so: the last one may take long.
        more = bytearray([time.perf_counter() < ends])
        if rank == 0:
            comm.Send([more, MPI.BYTE], dest=1)
        else:
            comm.Recv([more, MPI.BYTE], source=0)
        if not more[0] and turn >= WARMUP:
            break
    return trips


def _buffers(comm: Any, payload_bytes: int, rank: int) -> Callable[[], None]:
    data, peer = bytearray(payload_bytes), 1 - rank

    def trip() -> None:
        if rank == 0:
            comm.Send([data, MPI.BYTE], dest=peer)
        comm.Recv([data, MPI.BYTE], source=peer)
        if rank == 1:
            comm.Send([data, MPI.BYTE], dest=peer)

    return trip


def _objects(comm: Any, payload_bytes: int, rank: int) -> Callable[[], None]:
    data, peer, pickled = bytes(payload_bytes), 1 - rank, pkl5.Intracomm(comm)

    def trip() -> None:
        if rank == 0:
            pickled.send(data, dest=peer)
        pickled.recv(source=peer)
        if rank == 1:
            pickled.send(data, dest=peer)

    return trip
