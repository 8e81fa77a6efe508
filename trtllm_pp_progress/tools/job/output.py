"""The file that a result goes to: tried before anything is measured, so that no result is lost to a bad path."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["check_writable"]


def check_writable(path: Path | None) -> None:
    """Open a result's file for writing and leave it as it was; ClickException names the path and what is wrong."""
    if path is None:
        return
    made = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
    if made:
        path.unlink()
