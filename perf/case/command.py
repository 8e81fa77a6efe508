"""The performance case as a command: its options, its engine, and where it runs: here, or on ranks that it starts."""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

import output
from case import engines, judge, trtllm
from case.ids import PUBLISHED, Case, CaseError, parse, scaled
from case.names import POLICY_NAMES
from trtllm_pp_progress.tools.job.clock import require_one_clock
from trtllm_pp_progress.tools.job.launch import TRANSPORTS, launch
from trtllm_pp_progress.tools.job.options import JSON_FILE, Names
from trtllm_pp_progress.tools.job.role import role
from trtllm_pp_progress.tools.job.world import check_world, start_mpi
from verdict import Verdict, of_code

__all__ = ["command", "execute", "options_from"]

SCRIPT = Path(__file__).parents[1] / "test_perf.py"  # what ranks are started with
POLICIES = ("regressed", "flush", "oneshot", "iprobe", "patched")  # unless told otherwise
STACKS_S = 15.0  # more for the launcher than for the ranks: one that is stuck shows its stacks first


@click.command("test_perf", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("case_id", metavar="[CASE]", default=PUBLISHED)
@click.option("--engine", default="auto", show_default=True, help=f"auto, {', '.join(engines.ENGINES)}.")
@click.option("--model", help="A Qwen3 checkpoint directory or qwen3-random:SIZE; random weights by default.")
@click.option("--scale", type=float, help="Shorten the prompt to this part of it.")
@click.option("--requests", type=int, help="Fewer requests than the case has.")
@click.option("--output", type=int, help="Fewer output tokens than the case has.")
@click.option(
    "--policies",
    default=",".join(POLICIES),
    show_default=True,
    type=Names("policy", POLICY_NAMES),
    help=f"Of {', '.join(POLICY_NAMES)}.",
)
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1, 100), help="Runs of each, interleaved.")
@click.option("--seconds", type=click.FloatRange(1), help="Begin no round of all policies that may take longer in all.")
@click.option("--link", default="auto", show_default=True, type=click.Choice(["auto", "shared", "ipc", "nccl"]))
@click.option(
    "--host-work-ms", type=click.FloatRange(0, 1000), help="PyExecutor's own Python in a step that has a batch."
)
@click.option("--hold-gil", is_flag=True, help="Keep the GIL throughout that work; else it is given up now and then.")
@click.option(
    "--payload", default=65536, show_default=True, type=click.IntRange(0, 1 << 30), help="Sample state, bytes."
)
@click.option(
    "--compare", default=32, show_default=True, type=click.IntRange(0), help="Tokens checked with the unsplit model."
)
@click.option("--transport", default="tcp", show_default=True, type=click.Choice(list(TRANSPORTS)))
@click.option(
    "--check",
    type=click.Choice(["threshold", "pairs", "tokens"]),
    help="What fails a run, besides wrong tokens: upstream's threshold (host-gpu), a patched run below its unpatched "
    "one, or nothing (host-cpu).",
)
@click.option("--good", type=click.FloatRange(0), help="trtllm: tokens/s of a build before the regression.")
@click.option("--timeout", default=900.0, show_default=True, type=click.FloatRange(1), help="Seconds for everything.")
@click.option("--json", "json_file", type=JSON_FILE, help="Write the result here.")
def command(case_id: str, **options: Any) -> None:
    """Run CASE, an id as upstream's tests have it.

    Exit code 0: passed; 1: failed; 2: bad input; 3: inconclusive, for the regressed relay lost too little.
    """
    try:
        found = execute(parse(case_id), sys.argv[1:], **options)
    except CaseError as error:
        raise click.ClickException(str(error)) from None
    raise SystemExit(found.code)


def options_from(arguments: list[str]) -> dict[str, Any]:
    """Return what a command line says, by parameter; `case_id` is one of them."""
    return dict(command.make_context("test_perf", list(arguments)).params)


def execute(case: Case, arguments: list[str], *, transport: str, timeout: float, **options: Any) -> Verdict:
    """Run a case as this process can: as a rank, through trtllm-bench, or by starting ranks with `arguments`.

    Returns the verdict, on every rank.
    """
    engine = engines.choose(options.pop("engine"), case, engines.look())
    good = options.pop("good")
    if engine == "trtllm":
        return _with_trtllm(case, good=good, timeout=timeout, **options)
    if role(os.environ) is None:
        return of_code(launch(case.pp, transport, [str(SCRIPT), *arguments], timeout + STACKS_S))
    comm = start_mpi().COMM_WORLD
    check_world(comm, case.pp)
    require_one_clock(comm, "the performance case")
    from case.rank import as_rank, together

    faulthandler.dump_traceback_later(timeout, exit=True)  # a rank that exits ends the others
    try:
        return together(comm, lambda: as_rank(comm, case, engine, transport, **options))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _with_trtllm(
    case: Case,
    *,
    model: str | None,
    scale: float | None,
    requests: int | None,
    repeat: int,
    good: float | None,
    timeout: float,
    json_file: Path | None,
    **options: Any,
) -> Verdict:
    """Run TensorRT-LLM without and with the patch; without `good`, the patched run must be the faster one."""
    run, reduced = scaled(case, scale or 1, requests, options["output"])
    with tempfile.TemporaryDirectory() as folder:
        rows = trtllm.run(run, Path(folder), None if model is None else Path(model), repeat, timeout)
    if good is not None:
        found = judge.against_threshold(rows | {"flush": [{"tokens_per_s": good}]}, kernels=False)
    else:
        rate = {policy: statistics.median(row["tokens_per_s"] for row in runs) for policy, runs in rows.items()}
        found = judge.without_good(rate["regressed"], rate["patched"])
    for policy, runs in rows.items():
        click.echo(f"{policy}: {', '.join(format(row['tokens_per_s'], '.2f') for row in runs)} tokens/s")
    click.echo(f"scaled: {', '.join(reduced)}" if reduced else "as the case has it")
    click.echo("\n".join(found.lines("PASSED")))
    if json_file is not None:
        output.write(
            json_file, case=case.id, run=run.id, scaled=reduced, engine="trtllm", rows=rows, failures=found.failures,
            inconclusive=found.inconclusive,
        )  # fmt: skip
    return found
