"""Why 256 polls? Budget, re-arm interval and payload swept, over TCP and shared memory; data as CSV, and a plot.

    python perf sweep                     # about 25 minutes on a quiet machine; starts mpirun itself
    python perf sweep --quick --csv /tmp/sweep.csv --plot /tmp/sweep.png
    python perf sweep --plot-only

A run that was interrupted goes on where it stopped: what is in the CSV is not measured again. Remove the file to begin
anew. perf/results/README.md says what follows from it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import click

from relay.plot import draw
from relay.points import PARTS, PAYLOADS, Measured, Point, append, points, read
from trtllm_pp_progress.tools.job.launch import TRANSPORTS, launch
from trtllm_pp_progress.tools.job.options import Names, run_command
from trtllm_pp_progress.tools.job.payload import Buffer
from trtllm_pp_progress.tools.job.role import role
from trtllm_pp_progress.tools.job.world import world

RESULTS = Path(__file__).parents[1] / "results"
COMPUTE_S, REENTRY_S = 0.002, 0.25  # the bench's steady


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--transports", default="tcp,shm", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--parts", default=",".join(PARTS), show_default=True, type=Names("part", PARTS))
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 100), help="Runs of each, interleaved.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(10), help="Tokens timed.")
@click.option("--seconds", default=2.0, show_default=True, help="A slow point is timed over fewer tokens.")
@click.option("--quick", is_flag=True, help="Three values of each instead of all.")
@click.option("--largest", default=PAYLOADS[-1], show_default=True, type=click.IntRange(PAYLOADS[0]), help="Payload.")
@click.option("--csv", "csv_file", default=RESULTS / "sweep.csv", type=click.Path(path_type=Path))
@click.option("--plot", default=RESULTS / "sweep.png", type=click.Path(path_type=Path))
@click.option("--plot-only", is_flag=True, help="Measure nothing.")
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds for each transport.")
def command(
    transports: list[str],
    parts: list[str],
    pp: int,
    repeat: int,
    steps: int,
    seconds: float,
    quick: bool,
    largest: int,
    csv_file: Path,
    plot: Path,
    plot_only: bool,
    timeout: float,
) -> None:
    """Sweep budget, re-arm interval and payload, and plot."""
    if role(os.environ) is not None:
        wanted = list(points(transports[0], parts, repeat, quick, largest))
        with world(pp) as comm:
            code = _as_rank(comm, wanted, steps, seconds, csv_file)
        raise SystemExit(code)
    for transport in [] if plot_only else transports:
        code = launch(pp, transport, [*sys.argv, "--transports", transport], timeout)
        if code:
            raise SystemExit(code)
    draw(read(csv_file), plot)
    click.echo(f"{csv_file} and {plot} written")


def _as_rank(comm: Any, wanted: list[Point], steps: int, seconds: float, csv_file: Path) -> int:
    from trtllm_pp_progress.tools.bench.rows import row
    from trtllm_pp_progress.tools.job.console import console

    first = comm.Get_rank() == 0
    done = {Point(*astuple(measured)[: len(fields(Point))]) for measured in read(csv_file)} if first else None
    done = comm.bcast(done)
    progress, wrong = console(sys.stderr), 0
    for number, point in enumerate(wanted, 1):
        if point in done:
            continue
        outcome = _run(comm, point, steps, seconds)
        if outcome is None:
            continue
        one = row(point.part, point.relay, point.payload_bytes, [outcome])
        names = [field.name for field in fields(Measured)[len(fields(Point)) :]]
        measured = Measured(*astuple(point), *(getattr(one, name) for name in names))
        append(csv_file, measured)
        wrong += measured.wrong
        progress.print(f"{number}/{len(wanted)} {point}: {measured.tokens_per_s:.2f} tokens/s")
    return int(comm.bcast(wrong) > 0)


def _run(comm: Any, point: Point, steps: int, seconds: float) -> Any:
    from trtllm_pp_progress.tools.bench.measure import run
    from trtllm_pp_progress.tools.host import OneshotExecutor, RingStage, connect_pipeline

    class Burst(OneshotExecutor):
        def progress_pp_send_handles(
            self, send_handles: list[Any], microbatch_id: int, max_polls: int = point.budget
        ) -> None:
            super().progress_pp_send_handles(send_handles, microbatch_id, max_polls)

    settings: dict[str, Any] = {"max_polls": point.budget}
    if point.interval_us:
        settings |= {"backoff_min_us": point.interval_us, "backoff_max_us": point.interval_us}
    return run(
        comm,
        point.relay,
        lambda: RingStage(*connect_pipeline(comm), COMPUTE_S, point.payload_bytes, wrap=Buffer),
        [[0]],
        steps,
        max_seconds=seconds,
        settings=settings,
        executor_class=Burst if point.relay == "oneshot" else None,
        reentry_s=REENTRY_S,
        late=(lambda: point.late_ms * 1e-3) if point.late_ms else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input is one line on stderr and exit code 2."""
    run_command(command, arguments)
