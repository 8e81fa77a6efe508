"""The bench as one rank sees it: every repetition of every policy in every scenario, interleaved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_pp_progress.tools.bench.floor import floor, label
from trtllm_pp_progress.tools.bench.measure import interleaved, run
from trtllm_pp_progress.tools.bench.rows import Floor, Outcome, Row, row
from trtllm_pp_progress.tools.bench.scenarios import SCENARIOS, Scenario, caution
from trtllm_pp_progress.tools.bench.table import print_table, write_json
from trtllm_pp_progress.tools.host import RingStage, connect_pipeline
from trtllm_pp_progress.tools.job.console import console, header
from trtllm_pp_progress.tools.job.environment import environment
from trtllm_pp_progress.tools.job.hosts import hosts_of_ranks

__all__ = ["bench_rank"]

PROMPT = [0]


def bench_rank(
    comm: Any,
    transport: str,
    policies: list[str],
    scenarios: list[str],
    repeat: int,
    compute_ms: float | None,
    payload: int | None,
    reentry_ms: float | None,
    steps: int | None,
    network: str | None,
    json_file: Path | None,
) -> int:
    """Measure as one rank of `comm` and report on rank 0; return the exit code: 1 if any payload was wrong."""
    out, progress = console(sys.stdout), console(sys.stderr)
    carried = label(comm, transport)
    rows: list[Row] = []
    floors: dict[int, Floor] = {}  # by payload
    hosts = hosts_of_ranks(comm)
    for name in scenarios:
        scenario = _adapted(SCENARIOS[name], compute_ms, payload, reentry_ms, steps)
        outcomes = interleaved(policies, repeat, partial(_run, comm, scenario, network), partial(progress.print, name))
        if scenario.payload_bytes not in floors:
            floors[scenario.payload_bytes] = floor(comm, scenario.payload_bytes, _longest(hosts))
        if comm.Get_rank() == 0:
            rows += [row(name, policy, scenario.payload_bytes, outcomes[policy]) for policy in policies]
    if comm.Get_rank() == 0:
        described, found = environment(transport, hosts) | {"carrier": carried}, list(floors.values())
        out.print(header(described))
        print_table(rows, out, found)
        for name in scenarios:
            if said := caution(SCENARIOS[name], policies):
                out.print(said)
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


def _longest(hosts: Sequence[str]) -> tuple[int, int]:
    """Return the first two neighbours on different hosts; the first two where there is one host."""
    return next(((rank, rank + 1) for rank in range(len(hosts) - 1) if hosts[rank] != hosts[rank + 1]), (0, 1))


def _run(comm: Any, scenario: Scenario, network: str | None, policy: str) -> Outcome | None:
    rank, size = comm.Get_rank(), comm.Get_size()
    return run(
        comm,
        policy,
        lambda: RingStage(
            *connect_pipeline(comm, network), scenario.compute(rank, size), scenario.payload_bytes, scenario.rendezvous
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
