"""The floor: a plain ping-pong of the same bytes in the same run, which no relay can be faster than."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from mpi4py.util import pkl5

from trtllm_pp_progress.tools.bench.rows import Floor, quantile
from trtllm_pp_progress.tools.job.carrier import carrier, counted, mislabelled
from trtllm_pp_progress.tools.job.ranks import quiet_barrier
from trtllm_pp_progress.tools.job.world import end_all

__all__ = ["floor", "label"]

WARMUP, ROUNDS, MAX_S = 5, 300, 1.0
LABEL_BYTES = 1_000_000


def floor(comm: Any, payload_bytes: int, between: tuple[int, int] = (0, 1)) -> Floor:
    """Play ping-pong between two ranks, both inside MPI all the time; collective, returns the same on every rank."""
    rank, (first, second) = comm.Get_rank(), between
    result = None
    if rank in between:
        side = (rank == first, second if rank == first else first)
        buffers, objects = (_rounds(comm, payload_bytes, *side, make) for make in (_buffers, _objects))
        if rank == first:
            result = Floor(
                payload_bytes,
                buffers_ms_p50=quantile(buffers, 0.5),
                buffers_ms_p99=quantile(buffers, 0.99),
                pkl5_ms_p50=quantile(objects, 0.5),
                pkl5_ms_p99=quantile(objects, 0.99),
                rounds=[len(buffers), len(objects)],
                ranks=[first, second],
            )
    quiet_barrier(comm)
    measured: Floor = comm.bcast(result, root=first)
    return measured


def label(comm: Any, transport: str) -> str:
    """Return what carries a message from rank 0 to rank 1; collective.

    Ends every rank with exit code 2, and one line on rank 0, where that is not the transport that was asked for.
    """
    before, data = counted(), bytearray(LABEL_BYTES)
    if comm.Get_rank() == 0:
        comm.Recv([bytearray(1), MPI.BYTE], source=1)  # it has read its counters: an eager send does not wait for it
        comm.Send([data, MPI.BYTE], dest=1)
    if comm.Get_rank() == 1:
        comm.Send([bytearray(1), MPI.BYTE], dest=0)
        comm.Recv([data, MPI.BYTE], source=0)
    hosts = comm.allgather(socket.gethostname())
    carried = str(comm.bcast(carrier(before, counted(), LABEL_BYTES, hosts[0] == hosts[1]), root=1))
    if problem := mislabelled(transport, carried):
        end_all(comm, problem)
    return carried


def _rounds(
    comm: Any, payload_bytes: int, leads: bool, peer: int, make: Callable[..., Callable[[], None]]
) -> list[float]:
    trip, trips = make(comm, payload_bytes, leads, peer), list[float]()
    ends = time.perf_counter() + MAX_S
    for turn in range(WARMUP + ROUNDS):
        started = time.perf_counter()
        trip()
        if turn >= WARMUP:
            trips.append(round((time.perf_counter() - started) / 2 * 1e3, 4))
        # One decides, and says so: the last one may take long.
        more = bytearray([time.perf_counter() < ends])
        if leads:
            comm.Send([more, MPI.BYTE], dest=peer)
        else:
            comm.Recv([more, MPI.BYTE], source=peer)
        if not more[0] and turn >= WARMUP:
            break
    return trips


def _buffers(comm: Any, payload_bytes: int, leads: bool, peer: int) -> Callable[[], None]:
    data = bytearray(payload_bytes)

    def trip() -> None:
        if leads:
            comm.Send([data, MPI.BYTE], dest=peer)
        comm.Recv([data, MPI.BYTE], source=peer)
        if not leads:
            comm.Send([data, MPI.BYTE], dest=peer)

    return trip


def _objects(comm: Any, payload_bytes: int, leads: bool, peer: int) -> Callable[[], None]:
    data, pickled = bytes(payload_bytes), pkl5.Intracomm(comm)

    def trip() -> None:
        if leads:
            pickled.send(data, dest=peer)
        pickled.recv(source=peer)
        if not leads:
            pickled.send(data, dest=peer)

    return trip
