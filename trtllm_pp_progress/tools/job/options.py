"""What the options of every tool have in common: how a value is read, and how a bad one is answered."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from trtllm_pp_progress.settings.schema import SettingsError
from trtllm_pp_progress.tools.job.console import readable
from trtllm_pp_progress.tools.job.launch import LaunchError

__all__ = ["BAD_INPUT", "JSON_FILE", "Finite", "Names", "Network", "Sizes", "failing_as", "run_command"]

BAD_INPUT = 2
BAD = (click.ClickException, SettingsError, LaunchError)  # what is the user's to correct
JSON_FILE = click.Path(dir_okay=False, path_type=Path)


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


class Sizes(click.ParamType):  # type: ignore[type-arg]
    """A comma-separated list of sizes in bytes, from 1 to 1 GiB."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Return the sizes; ClickException names the first that is not one."""
        sizes = value.split(",") if isinstance(value, str) else list(value)  # click 8.0 converts a default twice
        return [click.IntRange(1, 1 << 30)(size, param, ctx) for size in sizes]


class Network(click.ParamType):  # type: ignore[type-arg]
    """An IPv4 network, as 10.0.0.0/8."""

    name = "network"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return it as text; ClickException names what is no network."""
        try:
            return str(ipaddress.IPv4Network(value))
        except ValueError as error:
            raise click.ClickException(f"{error}: valid are IPv4 networks, as 10.0.0.0/8") from None


class Finite(click.FloatRange):
    """A float range that nan and inf are outside of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; bad input if it is not finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


@contextlib.contextmanager
def failing_as(code: int) -> Iterator[None]:
    """Exit with `code`, and a traceback, where the block fails itself; bad input is left to run_command()."""
    try:
        yield
    except (*BAD, click.exceptions.Abort):
        raise
    except Exception:
        traceback.print_exc()
        raise SystemExit(code) from None


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input is one line on stderr and exit code 2."""
    readable()
    try:
        command.main(args=None if arguments is None else list(arguments), standalone_mode=False)
    except BAD as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"Error: {message}", err=True)
        raise SystemExit(BAD_INPUT) from None
    except click.exceptions.Abort:
        raise SystemExit(130) from None
