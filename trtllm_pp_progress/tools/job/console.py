"""Where tables are printed, and what becomes of a program whose output nobody takes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import click
from rich.console import Console

__all__ = ["console", "header", "readable", "unread"]


def console(file: TextIO) -> Console:
    """Return a console for plain text of a fixed width: mpirun's pseudo-terminal has no width or colour to trust."""
    return Console(file=file, width=120, force_terminal=False, highlight=False)


def header(environment: Mapping[str, Any]) -> str:
    """Return the line above every table that says what was measured on: all that is set."""
    return "# " + ", ".join(f"{key} {value}" for key, value in environment.items() if value != "")


def readable() -> None:
    """See that whatever is printed can be: a closed output takes anything, a character that it has not is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for the rest of the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Print in the block: a reader that has gone, or a full disk, changes nothing of the exit code."""
    try:
        yield
        sys.stdout.flush()
    except SystemExit:  # of rich, where the reader has gone
        pass
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            click.echo(f"the output could not be written: {error.strerror}", err=True)
        # What is left in the buffer would be tried once more at exit, and end it with another code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
