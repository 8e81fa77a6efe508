"""The command line: `trtllm-pp-progress bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import trtllm_pp_progress
from trtllm_pp_progress._settings import Settings, SettingsError, load

__all__ = ["main"]

BAD_INPUT = 2


class _Names(click.ParamType):
    """A comma-separated list of names out of a given few."""

    def __init__(self, what: str, valid: Sequence[str]) -> None:
        self.name, self._what, self._valid = "names", what, valid

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
        for name in names:
            if name not in self._valid:
                raise click.ClickException(f"unknown {self._what} {name!r}: valid ones are {', '.join(self._valid)}")
        return names


# Names are repeated here so that --help needs no MPI; tests hold them against the bench's own.
POLICIES = ("regressed", "flush", "oneshot", "inline", "iprobe", "patched")
SCENARIOS = ("published", "steady", "late", "large", "many")
TRANSPORTS = ("tcp", "shm", "default")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(trtllm_pp_progress.__version__)
def cli() -> None:
    """Keep TensorRT-LLM's pipeline-parallel ring moving, and measure it."""


@cli.command()
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option("--policies", default="regressed,flush,oneshot,patched", show_default=True, type=_Names("policy", POLICIES))
@click.option("--scenarios", default="steady", show_default=True, type=_Names("scenario", SCENARIOS))
@click.option("--transport", default="tcp", show_default=True, type=_Names("transport", TRANSPORTS))
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 1000), help="Runs of each, interleaved.")
@click.option("--compute-ms", type=click.FloatRange(0, 10_000), help="Stage time instead of the scenario's.")
@click.option("--payload", type=click.IntRange(0, 1 << 30), help="Payload bytes instead of the scenario's.")
@click.option("--reentry-ms", type=click.FloatRange(0.01, 60_000), help="Re-entry period instead of the scenario's.")
@click.option("--steps", type=click.IntRange(10, 100_000), help="Tokens timed instead of the scenario's.")
@click.option("--timeout", default=1800.0, show_default=True, type=click.FloatRange(1), help="Seconds for everything.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write rows and samples here.")
def bench(pp: int, transport: list[str], timeout: float, **options: Any) -> None:
    """Measure the relay policies on the model-free ring, starting mpirun itself or as a rank of yours."""
    from trtllm_pp_progress.bench._launch import LaunchError, launch, under_mpi

    load(Settings)  # a bad variable is said once, here, not by every rank
    if len(transport) != 1:
        raise click.ClickException("--transport takes one transport")
    if under_mpi(os.environ):
        _as_rank(pp, transport[0], **options)
        return
    try:
        code = launch(pp, transport[0], ["-m", "trtllm_pp_progress", *sys.argv[1:]], timeout)
    except LaunchError as error:
        raise click.ClickException(str(error)) from None
    raise SystemExit(code)


def _as_rank(pp: int, transport: str, **options: Any) -> None:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise click.ClickException(f"mpi4py cannot be used: {error}; install trtllm-pp-progress[perf]") from None
    from trtllm_pp_progress.bench._run import bench_rank
    from trtllm_pp_progress.host import require_thread_multiple

    problem = None
    if MPI.COMM_WORLD.Get_size() != pp:
        problem = f"{MPI.COMM_WORLD.Get_size()} ranks were started, but --pp is {pp}: they must be the same"
    else:
        try:
            require_thread_multiple()
        except RuntimeError as error:
            problem = str(error)
    if problem is not None:
        if MPI.COMM_WORLD.Get_rank() == 0:
            click.echo(f"Error: {problem}", err=True)
        raise SystemExit(BAD_INPUT)
    raise SystemExit(bench_rank(transport, **options))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input is one line on stderr and exit code 2."""
    try:
        cli.main(args=None if arguments is None else list(arguments), standalone_mode=False)
    except (click.ClickException, SettingsError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"Error: {message}", err=True)
        raise SystemExit(BAD_INPUT) from None
    except click.exceptions.Abort:
        raise SystemExit(130) from None
