"""The command line: `trtllm-pp-progress run`, `doctor`, `probe`, `bench`, and `watch`, `ab` and `export`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress.door.place import DoorError
from trtllm_pp_progress.settings.core import Settings, switched_on
from trtllm_pp_progress.settings.schema import load
from trtllm_pp_progress.settings.version import __version__
from trtllm_pp_progress.tools.bench.scenarios import ALTERNATIVES, POLICY_NAMES, SCENARIOS, listing
from trtllm_pp_progress.tools.job.launch import TRANSPORTS
from trtllm_pp_progress.tools.job.options import JSON_FILE, Finite, Names, Network, Sizes, failing_as, run_command
from trtllm_pp_progress.tools.job.output import check_writable

__all__ = ["cli", "main"]

CANNOT_TELL = 2  # exit code of doctor and probe, also where they fail themselves: 1 is a verdict


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__)
@click.pass_context
def cli(context: click.Context) -> None:
    """Keep TensorRT-LLM's pipeline-parallel ring moving, and measure it."""
    if context.invoked_subcommand is None:
        raise click.UsageError(context.get_help())  # by itself, click before 8.2 exits with 0


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Run COMMAND with the patch turned on in every Python process it starts.

    As in `trtllm-pp-progress run -- mpirun -n 4 ...`. Its exit code is the command's; 127 if there is no such command.
    TRTLLM_PP_PROGRESS=0 in the environment keeps the patch off.
    """
    from trtllm_pp_progress.installation.run import RunError, execute
    from trtllm_pp_progress.vllm.diagnosis import findings

    switched_on()
    load(Settings)  # a bad variable is said once, here, not by every rank
    for finding in findings():
        if finding["severity"] == "error":  # the policy for vLLM was asked for, and would not be there
            click.echo(f"Warning: {finding['means']}: {finding['do']}", err=True)
    try:
        execute(command)
    except RunError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.code) from None


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--timeout", default=120.0, show_default=True, type=Finite(1), help="Seconds for each import.")
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Start two ranks on this host where that is possible.",
)
def doctor(as_json: bool, timeout: float, measure: bool) -> None:
    """Say whether sends are parked here, whether the patch cures it, and what to do. Run it as the workers are run.

    Under mpirun rank 0 says it of all ranks. Exit code 0: fine or cured, 1: affected, 2: cannot tell.
    """
    from trtllm_pp_progress.tools.doctor.start import doctor as start

    with failing_as(CANNOT_TELL):
        code = start(as_json, timeout, measure)
    raise SystemExit(code)


@cli.command(epilog="\b\nScenarios:\n" + listing())
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option(
    "--policies",
    default="regressed,flush,oneshot,patched",
    show_default=True,
    type=Names("policy", (*POLICY_NAMES, *ALTERNATIVES)),
    help="eager and async are settings, UCX_RNDV_THRESH=inf and MPICH's progress thread, in an mpirun each.",
)
@click.option("--scenarios", default="steady", show_default=True, type=Names("scenario", tuple(SCENARIOS)))
@click.option("--transport", default="tcp", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 1000), help="Runs of each, interleaved.")
@click.option("--compute-ms", type=Finite(0, 10_000), help="Stage time instead of the scenario's.")
@click.option("--payload", type=click.IntRange(0, 1 << 30), help="Payload bytes instead of the scenario's.")
@click.option("--reentry-ms", type=Finite(0.01, 60_000), help="Re-entry period instead of the scenario's.")
@click.option("--network", type=Network(), help="Activations' network, as 10.0.0.0/8, where hosts share several.")
@click.option("--steps", type=click.IntRange(10, 100_000), help="Tokens timed instead of the scenario's.")
@click.option("--timeout", default=1800.0, show_default=True, type=Finite(1), help="Seconds for everything.")
@click.option("--json", "json_file", type=JSON_FILE, help="Write rows and samples here.")
def bench(**options: Any) -> None:
    """Measure the relay policies on the model-free ring, starting mpirun itself or as a rank of yours."""
    from trtllm_pp_progress.tools.bench.start import bench as start

    raise SystemExit(start(**options))


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
    type=Sizes(),
    help="Bytes.",
)
@click.option(
    "--edge/--no-edge", default=True, show_default=True, help="Seek the size from which sends are rendezvous."
)
@click.option("--step-timeout", default=30.0, show_default=True, type=Finite(0.1), help="Seconds for each step.")
@click.option("--timeout", default=600.0, show_default=True, type=Finite(1), help="Seconds for each mpirun.")
@click.option("--json", "json_file", type=JSON_FILE, help="Write what was found here.")
def probe(**options: Any) -> None:
    """Tell whether a send progresses here while its sender is outside MPI: 0 yes, 1 no (affected), 2 cannot tell."""
    from trtllm_pp_progress.tools.probe.start import probe as start

    with failing_as(CANNOT_TELL):
        code = start(**options)
    raise SystemExit(code)


PID = click.option("--pid", "pids", multiple=True, type=click.IntRange(1), help="Of this process only; repeatable.")


@cli.command()
@PID
@click.option("--period", default=1.0, show_default=True, type=Finite(0.05, 3600), help="Seconds of a window.")
@click.option("--once", is_flag=True, help="One window, and end.")
@click.option("--json", "form", flag_value="json", help="A line of JSON a window.")
@click.option("--csv", "form", flag_value="csv", help="Rows of CSV a window.")
@click.option(
    "--trace",
    nargs=2,
    type=(Finite(0.1, 3600), click.Path(dir_okay=False, path_type=Path)),
    metavar="SECONDS FILE",
    help="Follow for so long and write a trace for Perfetto.",
)
def watch(pids: tuple[int, ...], period: float, once: bool, form: str | None, trace: tuple[float, Path] | None) -> None:
    """Show what the ring does in every patched process of this host; exit code 1 where there is none."""
    from trtllm_pp_progress.tools.watch.live import watch as show

    if trace is not None:
        check_writable(trace[1])
    raise SystemExit(_asked(lambda: show(pids, period, once, form or "table", trace)))


@cli.command()
@PID
@click.option("--seconds", default=60.0, show_default=True, type=Finite(0.5, 86400), help="For how long in all.")
@click.option("--period", default=5.0, show_default=True, type=Finite(0.2, 500), help="Seconds off, and seconds on.")
@click.option("--json", "as_json", is_flag=True, help="Print every period's values as JSON.")
def ab(pids: tuple[int, ...], seconds: float, period: float, as_json: bool) -> None:
    """Tell what driving is worth on the live traffic: turns it off and on in turns, and ends with it on."""
    from rich.console import Console

    from trtllm_pp_progress.tools.watch.ab import ab as measure
    from trtllm_pp_progress.tools.watch.ab import print_phases

    phases = _asked(lambda: measure(pids, seconds, period, lambda text: click.echo(text, err=True)))
    if as_json:
        click.echo(json.dumps({kind: vars(phase) for kind, phase in phases.items()}))
    else:
        print_phases(phases, Console(width=120, highlight=False))


@cli.command()
@click.option("--port", default=9400, show_default=True, type=click.IntRange(1, 65535))
@click.option("--address", default="127.0.0.1", show_default=True, help="The address to listen on.")
def export(port: int, address: str) -> None:
    """Serve Prometheus metrics of every patched process of this host."""
    from trtllm_pp_progress.tools.watch.export import serve

    serve(port, address)


def _asked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DoorError as error:
        raise click.ClickException(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `trtllm-pp-progress`."""
    run_command(cli, arguments)
