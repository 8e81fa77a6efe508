"""The command line: `trtllm-pp-progress run`, `doctor`, `probe` and `bench`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import trtllm_pp_progress
from trtllm_pp_progress._settings import Settings, SettingsError, load, switched_on
from trtllm_pp_progress.bench._launch import TRANSPORTS, LaunchError, launch, under_mpi
from trtllm_pp_progress.bench._scenarios import PEERS, POLICY_NAMES, SCENARIOS, listing

__all__ = ["POLICIES", "Finite", "Names", "check_world", "main", "run_command"]

BAD_INPUT = 2


class Names(click.ParamType):  # type: ignore[type-arg]  # generic only in newer releases
    """A comma-separated list of names out of a given few."""

    def __init__(self, what: str, valid: Sequence[str]) -> None:
        self.name, self._what, self._valid = "names", what, valid

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """Return the names; ClickException names the first that is not valid, and those that are."""
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
        for name in names:
            if name not in self._valid:
                raise click.ClickException(f"unknown {self._what} {name!r}: valid ones are {', '.join(self._valid)}")
        return names


class _Sizes(click.ParamType):  # type: ignore[type-arg]
    """A comma-separated list of sizes in bytes, from 1 to 1 GiB."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Return the sizes; ClickException names the first that is not one."""
        return [click.IntRange(1, 1 << 30).convert(size.strip(), param, ctx) for size in value.split(",")]


class Finite(click.FloatRange):
    """A float range that nan and inf are outside of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; bad input if it is not finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


POLICIES = POLICY_NAMES


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(trtllm_pp_progress.__version__)
def cli() -> None:
    """Keep TensorRT-LLM's pipeline-parallel ring moving, and measure it."""


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Run COMMAND with the patch turned on in every Python process it starts.

    As in `trtllm-pp-progress run -- mpirun -n 4 ...`. Its exit code is the command's; 127 if there is no such command.
    TRTLLM_PP_PROGRESS=0 in the environment keeps the patch off.
    """
    from trtllm_pp_progress._run import RunError, execute

    switched_on()
    load(Settings)  # a bad variable is said once, here, not by every rank
    try:
        execute(command)
    except RunError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.code) from None


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--timeout", default=120.0, show_default=True, type=Finite(1), help="Seconds for each import.")
def doctor(as_json: bool, timeout: float) -> None:
    """Say whether sends are parked here, whether the patch cures it, and what to do. Run it as the workers are run.

    Exit code 0: fine or cured, 1: affected, 2: cannot tell.
    """
    from trtllm_pp_progress.doctor import EXIT_CODES, collect

    report = collect(timeout)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console

        from trtllm_pp_progress.doctor._report import render

        render(report, Console(highlight=False))
    raise SystemExit(EXIT_CODES[report["verdict"]])


@cli.command(epilog="\b\nScenarios:\n" + listing())
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option(
    "--policies",
    default="regressed,flush,oneshot,patched",
    show_default=True,
    type=Names("policy", (*POLICY_NAMES, *PEERS)),
    help="eager and async are settings, UCX_RNDV_THRESH=inf and MPICH's progress thread, in an mpirun each.",
)
@click.option("--scenarios", default="steady", show_default=True, type=Names("scenario", tuple(SCENARIOS)))
@click.option("--transport", default="tcp", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 1000), help="Runs of each, interleaved.")
@click.option("--compute-ms", type=Finite(0, 10_000), help="Stage time instead of the scenario's.")
@click.option("--payload", type=click.IntRange(0, 1 << 30), help="Payload bytes instead of the scenario's.")
@click.option("--reentry-ms", type=Finite(0.01, 60_000), help="Re-entry period instead of the scenario's.")
@click.option("--steps", type=click.IntRange(10, 100_000), help="Tokens timed instead of the scenario's.")
@click.option("--timeout", default=1800.0, show_default=True, type=Finite(1), help="Seconds for everything.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write rows and samples here."
)
def bench(pp: int, transport: list[str], timeout: float, **options: Any) -> None:
    """Measure the relay policies on the model-free ring, starting mpirun itself or as a rank of yours."""
    load(Settings)  # a bad variable is said once, here, not by every rank
    if len(transport) != 1:
        raise click.ClickException("--transport takes one transport")
    peers = [policy for policy in options["policies"] if policy in PEERS]
    if not under_mpi(os.environ):
        if peers:
            from trtllm_pp_progress.bench._peers import bench_with_peers

            raise SystemExit(bench_with_peers(pp, transport[0], timeout, **options))
        raise SystemExit(launch(pp, transport[0], ["-m", "trtllm_pp_progress", *sys.argv[1:]], timeout))
    if peers:
        raise click.ClickException(
            f"policy {peers[0]!r} is a setting of the whole run: leave starting mpirun to the bench"
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(f"mpi4py cannot be used: {error}; install trtllm-pp-progress[mpi]") from None
    from trtllm_pp_progress.bench._run import bench_rank
    from trtllm_pp_progress.host import abort_on_failure

    check_world(MPI.COMM_WORLD, pp)
    with abort_on_failure(MPI.COMM_WORLD):
        code = bench_rank(transport[0], **options)
    raise SystemExit(code)


@cli.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 64), help="Where this starts mpirun.")
@click.option(
    "--transport",
    default="default,tcp,shm",
    show_default=True,
    type=Names("transport", tuple(TRANSPORTS)),
    help="One mpirun each; under your own mpirun yours is probed.",
)
@click.option(
    "--sizes",
    default="4096,65536,262143,262144,262145,1000000,8388608",
    show_default=True,
    type=_Sizes(),
    help="Bytes.",
)
@click.option("--step-timeout", default=30.0, show_default=True, type=Finite(0.1), help="Seconds for each step.")
@click.option("--timeout", default=600.0, show_default=True, type=Finite(1), help="Seconds for each mpirun.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write what was found here.")
def probe(**options: Any) -> None:
    """Tell whether a send progresses here while its sender is outside MPI: 0 yes, 1 no (affected), 2 cannot tell."""
    from trtllm_pp_progress.probe._start import probe as start

    raise SystemExit(start(**options))


def check_world(comm: Any, pp: int) -> None:
    """End every rank with exit code 2, and one line on rank 0, where this MPI cannot run `pp` stages."""
    from trtllm_pp_progress.host import require_thread_multiple

    problem = None
    if comm.Get_size() != pp:
        problem = f"{comm.Get_size()} ranks were started, but --pp is {pp}: they must be the same"
    else:
        try:
            require_thread_multiple()
        except RuntimeError as error:
            problem = str(error)
    if problem is not None:
        if comm.Get_rank() == 0:
            click.echo(f"Error: {problem}", err=True)
        raise SystemExit(BAD_INPUT)


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line on stderr and exit code 2."""
    try:
        command.main(args=None if arguments is None else list(arguments), standalone_mode=False)
    except (click.ClickException, SettingsError, LaunchError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"Error: {message}", err=True)
        raise SystemExit(BAD_INPUT) from None
    except click.exceptions.Abort:
        raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `trtllm-pp-progress`."""
    run_command(cli, arguments)
