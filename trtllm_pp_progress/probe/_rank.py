"""The probe as one rank sees it: links of the pipeline one after the other, and the report on rank 0."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress._settings import Settings, load
from trtllm_pp_progress.probe._guard import CANNOT_TELL, MOVES, PARKS, Steps
from trtllm_pp_progress.probe._report import print_run, write_json

__all__ = ["links", "probe_rank"]

OTHERS_S = 3600.0  # a rank that waits for the others leaves the watching to their watchdogs


def links(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pipeline's links to measure, (sender, receiver): the first between each two hosts, in its direction.

    A sample state travels from each rank to the next and from the last to the first.
    """
    chosen: dict[tuple[str, str], tuple[int, int]] = {}
    for sender in range(len(hosts)):
        receiver = (sender + 1) % len(hosts)
        chosen.setdefault((hosts[sender], hosts[receiver]), (sender, receiver))
    return list(chosen.values())


def probe_rank(step: Steps, transport: str, sizes: Sequence[int], json_file: Path | None) -> int:
    """Measure as one rank of COMM_WORLD and return the exit code, the same on every rank."""
    step("starting MPI")
    try:
        from mpi4py import MPI
        from mpi4py.util import pkl5
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(f"mpi4py cannot be used: {error}; install trtllm-pp-progress[mpi]") from None
    from trtllm_pp_progress.bench._floor import quiet_barrier
    from trtllm_pp_progress.bench._report import environment
    from trtllm_pp_progress.probe._measure import Link, WrongPayload

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if size < 2:
        raise click.ClickException("a probe takes 2 ranks or more: mpirun -n 2 trtllm-pp-progress probe")
    step("making a communicator")
    comm = pkl5.Intracomm(world.Dup())
    step("exchanging host names")
    hosts = world.allgather(socket.gethostname())
    settings = load(Settings)
    measured: list[dict[str, Any]] = []
    problem = ""
    for sender, receiver in links(hosts):
        found: dict[str, Any] = {}
        if rank in (sender, receiver):
            link = Link(comm, sender, receiver, settings)
            name = f"rank {sender} to rank {receiver}"
            try:
                found = _link(link, sizes, step, name)
            except WrongPayload as error:
                problem = str(error)
        step("waiting for the other ranks", OTHERS_S)
        quiet_barrier(world)
        step("collecting")
        found = world.bcast(found, root=sender)
        measured.append({"sender": sender, "receiver": receiver, "hosts": [hosts[sender], hosts[receiver]], **found})
    problem = next(filter(None, world.allgather(problem)), "")
    rows = [row for link in measured for row in link.get("rows", [])]
    code = CANNOT_TELL if problem else MOVES if all(row["moves"] for row in rows) else PARKS
    if rank == 0:
        step("reporting")
        run = {"transport": transport, "environment": environment(transport), "links": measured}
        print_run(run, problem, sys.stdout)
        if json_file is not None:
            write_json(json_file, [run], code, problem)
    step("MPI_Finalize")
    sys.stdout.flush()
    MPI.Finalize()
    step.done(code)
    return code


def _link(link: Any, sizes: Sequence[int], step: Steps, name: str) -> dict[str, Any]:
    from dataclasses import asdict

    edge = link.edge(max(sizes), lambda size: step(f"{name}: is a send of {size:,} bytes eager?"))
    around = () if edge is None else (edge - 1, edge, edge + 1)
    rows = []
    for size in sorted({*sizes, *(size for size in around if size > 0)}):
        step(f"{name}: {size:,} bytes")
        rows.append(asdict(link.row(size)))
    return {"edge_bytes": edge, "rows": rows}
