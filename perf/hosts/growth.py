"""How a step's time grows with the number of ranks, from results of the bench, and on to ranks that nobody has here.

    python perf growth pp4.json pp8.json pp16.json --to 64

Each file is what `trtllm-pp-progress bench --json` wrote, one number of ranks a file. A straight line through the times
of a step is continued: a stage more is a forward more, a hand-over of an activation and two small messages; the sample
state follows behind, hidden as long as a hop is shorter than a stage.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from output import described, table
from trtllm_pp_progress.tools.bench.scenarios import SCENARIOS
from trtllm_pp_progress.tools.job.options import run_command

__all__ = ["Steps", "growth", "line", "main"]

REFERENCE = "flush"
Steps = dict[str, dict[int, float]]  # ms a step, by policy and ranks


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--scenario", default="steady", show_default=True, type=click.Choice(list(SCENARIOS)))
@click.option("--to", "ranks", default=64, show_default=True, type=click.IntRange(2), help="Ranks to continue to.")
def command(files: tuple[Path, ...], scenario: str, ranks: int) -> None:
    """Print a step's time by policy and ranks, measured and continued."""
    steps: Steps = {}
    environment: dict[str, Any] = {}
    for path in files:
        written = json.loads(path.read_text(encoding="utf-8"))
        environment |= written["environment"]
        for row in written["rows"]:
            if row["scenario"] == scenario:
                rates = [run["tokens_per_s"] for run in row["raw"]]
                steps.setdefault(row["policy"], {})[row["pp"]] = 1e3 / statistics.median(rates)
    if not steps or min(map(len, steps.values())) < 2:
        raise click.ClickException(f"a line takes two numbers of ranks or more with the scenario {scenario!r}")
    environment.pop("ranks", None)
    print(described(environment))
    columns = ("policy", "ranks", "ms a step", f"of {REFERENCE}", "beyond compute, ms a stage")
    print(table(columns, growth(steps, ranks, SCENARIOS[scenario].compute_s * 1e3)))


def growth(steps: Mapping[str, Mapping[int, float]], ranks: int, compute_ms: float) -> list[tuple[str, ...]]:
    """Return the table's rows: every number of ranks that was measured, and `ranks`, on the line through them."""
    reference = steps.get(REFERENCE)
    rows = []
    for policy, measured in steps.items():
        for pp, step in [*sorted(measured.items()), (ranks, line(measured, ranks))]:
            other = None if reference is None else reference.get(pp, line(reference, pp))
            rows.append(
                (
                    policy,
                    f"{pp}" if pp in measured else f"{pp}, on paper",
                    f"{step:.2f}",
                    "-" if other is None else f"{other / step:.3f}",
                    f"{step / pp - compute_ms:.2f}",
                )
            )
    return rows


def line(measured: Mapping[int, float], at: float) -> float:
    """Return the value at `at` of the straight line through what was measured."""
    slope, intercept = statistics.linear_regression(list(measured), list(measured.values()))
    return intercept + slope * at


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python perf growth`."""
    run_command(command, arguments)
