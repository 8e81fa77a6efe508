"""The bench as one rank sees it: every repetition of every policy in every scenario, interleaved."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from mpi4py import MPI

from trtllm_pp_progress.bench._floor import floor
from trtllm_pp_progress.bench._measure import interleaved, run
from trtllm_pp_progress.bench._report import console, environment, print_table, write_json
from trtllm_pp_progress.bench._rows import Floor, Outcome, Row, row
from trtllm_pp_progress.bench._scenarios import SCENARIOS, Scenario
from trtllm_pp_progress.host import RingStage, connect_pipeline

__all__ = ["bench_rank"]

PROMPT = [0]


def bench_rank(
    transport: str,
    policies: list[str],
    scenarios: list[str],
    repeat: int,
    compute_ms: float | None,
    payload: int | None,
    reentry_ms: float | None,
    steps: int | None,
    json_file: Path | None,
) -> int:
    """Measure as one rank of COMM_WORLD and report on rank 0; return the exit code: 1 if any payload was wrong."""
    comm = MPI.COMM_WORLD
    out, progress = console(sys.stdout), console(sys.stderr)
    rows: list[Row] = []
    floors: dict[int, Floor | None] = {}  # by payload; None on the other ranks
    for name in scenarios:
        scenario = _adapted(SCENARIOS[name], compute_ms, payload, reentry_ms, steps)
        outcomes = interleaved(policies, repeat, partial(_run, comm, scenario), partial(progress.print, name))
        if scenario.payload_bytes not in floors:
            floors[scenario.payload_bytes] = floor(comm, scenario.payload_bytes)
        if comm.Get_rank() == 0:
            rows += [row(name, policy, scenario.payload_bytes, outcomes[policy]) for policy in policies]
    if comm.Get_rank() == 0:
        described, found = environment(transport), [measured for measured in floors.values() if measured]
        out.print("# " + ", ".join(f"{key} {value}" for key, value in described.items()))
        print_table(rows, out, found)
        if json_file is not None:
            write_json(json_file, rows, described, found)
    wrong = comm.bcast(sum(r.wrong for r in rows))
    sys.stdout.flush()
    return int(wrong > 0)


def _adapted(
    scenario: Scenario, compute_ms: float | None, payload: int | None, reentry_ms: float | None, steps: int | None
) -> Scenario:
    return replace(
        scenario,
        compute_s=scenario.compute_s if compute_ms is None else compute_ms * 1e-3,
        payload_bytes=scenario.payload_bytes if payload is None else payload,
        reentry_s=scenario.reentry_s if reentry_ms is None else reentry_ms * 1e-3,
        steps=scenario.steps if steps is None else steps,
    )


def _run(comm: MPI.Intracomm, scenario: Scenario, policy: str) -> Outcome | None:
    rank, size = comm.Get_rank(), comm.Get_size()
    return run(
        comm,
        policy,
        lambda: RingStage(
            *connect_pipeline(comm), scenario.compute(rank, size), scenario.payload_bytes, scenario.rendezvous
        ),
        [PROMPT] * scenario.concurrency,
        max(1, scenario.steps // scenario.concurrency),
        max_seconds=scenario.max_seconds,
        hold_s=scenario.holds(rank, size),
        busy=scenario.busy,
        reentry_s=scenario.reentry_s,
        late=scenario.late(rank),
        schedule_payload=bytes(scenario.schedule_bytes),
    )
