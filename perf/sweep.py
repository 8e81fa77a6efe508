"""Why 64? Budget, re-arm interval and payload swept, over TCP and shared memory; data as CSV, and a plot.

    python perf/sweep.py                     # about 25 minutes on a quiet machine; starts mpirun itself
    python perf/sweep.py --quick --csv /tmp/sweep.csv --plot /tmp/sweep.png
    python perf/sweep.py --plot-only

A run that was interrupted goes on where it stopped: what is in the CSV is not measured again. Remove the file to begin
anew. perf/README.md says what follows from it.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress.bench._buffer import Buffer
from trtllm_pp_progress.bench._launch import TRANSPORTS, launch, under_mpi
from trtllm_pp_progress.cli import Names, check_world, run_command

HERE = Path(__file__).parent
PARTS = ("budget", "interval", "payload")
BUDGETS = (1, 4, 16, 64, 256, 1024, 4096)
INTERVALS_US = (10, 20, 50, 100, 200, 500, 1000, 5000)
KIB = 1024
PAYLOADS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, KIB**2, 8 * KIB**2, 32 * KIB**2)
DEFAULT_BUDGET, DEFAULT_INTERVAL_US, DEFAULT_PAYLOAD = 256, 0, 64 * KIB  # interval 0: the patch's own back-off
COMPUTE_S, REENTRY_S = 0.002, 0.25  # the bench's steady


@dataclass(frozen=True)
class Point:
    """One run to make."""

    transport: str
    part: str
    relay: str
    budget: int
    interval_us: int
    payload_bytes: int
    late_ms: int
    repetition: int


@dataclass(frozen=True)
class Measured(Point):
    """One run made; the worst rank's times in milliseconds."""

    tokens_per_s: float
    parked_ms_p50: float
    parked_ms_p99: float
    parked_ms_max: float
    polls_per_step: float
    cpu_cores: float
    wrong: int


def points(transport: str, parts: list[str], repeat: int, quick: bool, largest: int) -> Iterator[Point]:
    """Yield all runs over one transport, repetition by repetition, so that all points meet the same machine."""

    def few(values: tuple[int, ...]) -> tuple[int, ...]:
        return (values[0], values[len(values) // 2], values[-1]) if quick else values

    for repetition in range(repeat):
        if "budget" in parts:
            for late_ms in (0, 20):
                for budget in few(BUDGETS):
                    for relay in ("oneshot", "patched"):
                        yield Point(transport, "budget", relay, budget, 0, DEFAULT_PAYLOAD, late_ms, repetition)
        if "interval" in parts:
            for interval_us in few(INTERVALS_US):
                yield Point(
                    transport, "interval", "patched", DEFAULT_BUDGET, interval_us, DEFAULT_PAYLOAD, 0, repetition
                )
        if "payload" in parts:
            for size in few(tuple(size for size in PAYLOADS if size <= largest)):
                for relay in ("flush", "oneshot", "patched"):
                    budget = 64 if relay == "oneshot" else DEFAULT_BUDGET
                    yield Point(transport, "payload", relay, budget, 0, size, 0, repetition)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--transports", default="tcp,shm", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--parts", default=",".join(PARTS), show_default=True, type=Names("part", PARTS))
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 100), help="Runs of each, interleaved.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(10), help="Tokens timed.")
@click.option("--seconds", default=2.0, show_default=True, help="A slow point is timed over fewer tokens.")
@click.option("--quick", is_flag=True, help="Three values of each instead of all.")
@click.option("--largest", default=PAYLOADS[-1], show_default=True, type=click.IntRange(PAYLOADS[0]), help="Payload.")
@click.option("--csv", "csv_file", default=HERE / "results" / "sweep.csv", type=click.Path(path_type=Path))
@click.option("--plot", default=HERE / "sweep.png", type=click.Path(path_type=Path))
@click.option("--plot-only", is_flag=True, help="Measure nothing.")
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds for each transport.")
def main(
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
    if under_mpi(os.environ):
        wanted = list(points(transports[0], parts, repeat, quick, largest))
        raise SystemExit(_as_rank(wanted, pp, steps, seconds, csv_file))
    for transport in [] if plot_only else transports:
        code = launch(pp, transport, [__file__, *sys.argv[1:], "--transports", transport], timeout)
        if code:
            raise SystemExit(code)
    draw(read(csv_file), plot)
    click.echo(f"{csv_file} and {plot} written")


def read(csv_file: Path) -> list[Measured]:
    """Return what has been measured; ClickException where the file is of another sweep."""
    if not csv_file.exists():
        return []
    with csv_file.open(newline="", encoding="utf-8") as file:
        table = csv.reader(file)
        names = [field.name for field in fields(Measured)]
        if next(table, None) != names:
            raise click.ClickException(f"{csv_file} has not the columns {', '.join(names)}")
        kinds = [{"str": str, "int": int, "float": float}[str(field.type)] for field in fields(Measured)]
        return [Measured(*(kind(value) for kind, value in zip(kinds, row, strict=True))) for row in table]


def _as_rank(wanted: list[Point], pp: int, steps: int, seconds: float, csv_file: Path) -> int:
    from mpi4py import MPI

    from trtllm_pp_progress.bench._report import console
    from trtllm_pp_progress.bench._rows import row

    comm = MPI.COMM_WORLD
    check_world(comm, pp)
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
        _append(csv_file, measured)
        wrong += measured.wrong
        progress.print(f"{number}/{len(wanted)} {point}: {measured.tokens_per_s:.2f} tokens/s")
    return int(comm.bcast(wrong) > 0)


def _append(csv_file: Path, measured: Measured) -> None:
    new = not csv_file.exists()
    with csv_file.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(field.name for field in fields(Measured))
        table.writerow(f"{value:.4f}" if isinstance(value, float) else value for value in asdict(measured).values())


def _run(comm: Any, point: Point, steps: int, seconds: float) -> Any:
    from trtllm_pp_progress.bench._measure import run
    from trtllm_pp_progress.host import OneshotExecutor, RingStage, connect_pipeline

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


def draw(measured: list[Measured], plot: Path) -> None:
    """Plot medians over repetitions: a row of panels a transport, a panel a part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    transports = list(dict.fromkeys(one.transport for one in measured))
    if not transports:
        raise click.ClickException("nothing has been measured: run without --plot-only first")
    figure, axes = plt.subplots(len(transports), 3, figsize=(15, 4 * len(transports)), squeeze=False)
    panels = {"budget": "tokens_per_s", "interval": "tokens_per_s", "payload": "parked_ms_p99"}
    swept = {"budget": "budget", "interval": "interval_us", "payload": "payload_bytes"}
    for transport, row in zip(transports, axes, strict=True):
        for (part, y), panel in zip(panels.items(), row, strict=True):
            x = swept[part]
            lines: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
            for one in measured:
                if (one.transport, one.part) == (transport, part):
                    lines[one.relay, one.late_ms][getattr(one, x)].append(getattr(one, y))
            for (relay, late_ms), values in lines.items():
                xs = sorted(values)
                label = relay + (f", receiver {late_ms} ms late" if late_ms else "")
                panel.plot(xs, [statistics.median(values[at]) for at in xs], marker="o", label=label)
            panel.set(xscale="log", xlabel=x, ylabel=y, title=f"{transport}: {part}")
            if part == "payload":
                panel.set_yscale("log")
            else:
                panel.set_ylim(bottom=0)  # a few per cent are what one run scatters by
            if lines:
                panel.legend()
    figure.tight_layout()
    figure.savefig(plot, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    run_command(main)
