"""The probe as one rank sees it: links of the pipeline one after the other, and the report on rank 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress.settings.core import Settings
from trtllm_pp_progress.settings.schema import load
from trtllm_pp_progress.tools.job.carrier import mislabelled
from trtllm_pp_progress.tools.job.environment import environment
from trtllm_pp_progress.tools.job.hosts import hosts_of_ranks
from trtllm_pp_progress.tools.job.ranks import quiet_barrier
from trtllm_pp_progress.tools.job.world import start_mpi
from trtllm_pp_progress.tools.probe.table import print_run, write_json
from trtllm_pp_progress.tools.probe.watchdog import CANNOT_TELL, MOVES, PARKS, Steps

__all__ = ["STARTING", "links", "probe_rank"]

STARTING = "starting MPI"
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


def probe_rank(step: Steps, transport: str, sizes: Sequence[int], edge: bool, json_file: Path | None) -> int:
    """Measure as one rank of COMM_WORLD and return the exit code, the same on every rank."""
    step(STARTING)
    mpi = start_mpi()
    world = mpi.COMM_WORLD
    if world.Get_size() < 2:
        raise click.ClickException("a probe takes 2 ranks or more: mpirun -n 2 trtllm-pp-progress probe")
    measured, problem = _measure(world, sizes, edge, step)
    wrong_labels = (mislabelled(transport, link["carrier"]) for link in measured if "carrier" in link)
    problem = problem or next(filter(None, wrong_labels), "")
    timings = [timing for link in measured for timing in link.get("rows", [])]
    code = CANNOT_TELL if problem else MOVES if all(timing["moves"] for timing in timings) else PARKS
    if world.Get_rank() == 0:
        step("reporting")
        run = {"transport": transport, "environment": environment(transport), "links": measured}
        print_run(run, problem, sys.stdout)
        if json_file is not None:
            write_json(json_file, [run], code, problem)
    step("MPI_Finalize")
    sys.stdout.flush()
    mpi.Finalize()
    step.done(code)
    return code


def _measure(world: Any, sizes: Sequence[int], edge: bool, step: Steps) -> tuple[list[dict[str, Any]], str]:
    """Measure every link, one after the other; return them as the report has them, and what went wrong on any rank."""
    from mpi4py.util import pkl5

    from trtllm_pp_progress.tools.probe.link import Link, WrongPayload

    rank, problem = world.Get_rank(), ""
    step("making a communicator")
    comm = pkl5.Intracomm(world.Dup())
    step("finding out who shares memory")
    hosts = hosts_of_ranks(world)
    settings = load(Settings)
    measured: list[dict[str, Any]] = []
    for sender, receiver in links(hosts):
        found: dict[str, Any] = {}
        if rank in (sender, receiver):
            link = Link(comm, sender, receiver, settings)
            try:
                found = _timings(link, sizes, edge, step, f"rank {sender} to rank {receiver}")
                step(f"rank {sender} to rank {receiver}: what carries {max(sizes):,} bytes?")
                found["carrier"] = link.carrier(max(sizes), hosts[sender] == hosts[receiver])
            except WrongPayload as error:
                problem = str(error)
        step("waiting for the other ranks", OTHERS_S)
        quiet_barrier(world)
        step("collecting")
        found = world.bcast(found, root=sender)
        measured.append({"sender": sender, "receiver": receiver, "hosts": [hosts[sender], hosts[receiver]], **found})
    return measured, next(filter(None, world.allgather(problem)), "")


def _timings(link: Any, sizes: Sequence[int], seek: bool, step: Steps, name: str) -> dict[str, Any]:
    edge = link.edge(max(sizes), lambda size: step(f"{name}: is a send of {size:,} bytes eager?")) if seek else None
    around = () if edge is None else (edge - 1, edge, edge + 1)
    rows = []
    for size in sorted({*sizes, *(size for size in around if size > 0)}):
        step(f"{name}: {size:,} bytes")
        rows.append(asdict(link.read(size)))
    return {**({"edge_bytes": edge} if seek else {}), "rows": rows}
