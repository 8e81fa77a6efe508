"""`trtllm-pp-progress run`: turn the package on for a command and all it starts, then become that command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from trtllm_pp_progress.settings.core import SWITCH

__all__ = ["BOOTSTRAP", "RunError", "environment", "execute"]

BOOTSTRAP = Path(__file__).parent / "bootstrap"  # holds sitecustomize.py and nothing else


class RunError(RuntimeError):
    """The command cannot be started: the message says why, `code` is what a shell would exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def environment(environ: Mapping[str, str], bootstrap: str = str(BOOTSTRAP)) -> dict[str, str]:
    """Return the environment of the command: switch on unless it is set, bootstrap first on PYTHONPATH, once."""
    rest = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry != bootstrap]
    path = os.pathsep.join([bootstrap, *rest] if any(rest) else [bootstrap])
    return {**environ, "PYTHONPATH": path, SWITCH: environ.get(SWITCH, "").strip() or "1"}


def execute(command: Sequence[str], environ: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by the command: its pid, and so what mpirun watches, stays. RunError if it cannot start."""
    try:
        os.execvpe(command[0], list(command), environment(os.environ if environ is None else environ))
    except (FileNotFoundError, ValueError):  # ValueError: an empty name
        raise RunError(f"{command[0]!r} was not found", 127) from None
    except OSError as error:
        raise RunError(f"{command[0]!r} cannot be run: {error.strerror}", 126) from None
