"""Start the ranks: which launcher is this, and what makes its MPI use the transport that was asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["TRANSPORTS", "LaunchError", "command", "find_launcher", "is_open_mpi", "launch", "under_mpi"]

# What UCX may use; the default forces nothing. Shared memory mostly hides the fault, TCP shows it.
TRANSPORTS: dict[str, str | None] = {"tcp": "tcp,self", "shm": "posix,sysv,cma,self", "default": None}
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class LaunchError(RuntimeError):
    """The ranks cannot be started; the message says what is missing."""


def under_mpi(environ: Mapping[str, str]) -> bool:
    """Tell whether this process was started by mpirun, mpiexec or srun."""
    return any(variable in environ for variable in RANK_VARIABLES)


def is_open_mpi(version: str) -> bool:
    """Tell from what `mpirun --version` says whether it is Open MPI's."""
    return any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE"))


def command(
    ranks: int,
    transport: str,
    arguments: Sequence[str],
    launcher: str,
    version: str,
    settings: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's command line and the variables it needs; `version` is what `launcher --version` says.

    `settings` are variables for the ranks beside the transport's.
    """
    tls = TRANSPORTS[transport]
    variables = {**({} if tls is None else {"UCX_TLS": tls}), **(settings or {})}
    line = [launcher, "-n", str(ranks)]
    if is_open_mpi(version):
        # Two ranks get a core each otherwise, for all their threads: one that spins in MPI keeps the others from it.
        line += ["--oversubscribe", "--bind-to", "none"]
        if tls is not None:  # without these Open MPI refuses UCX on anything but InfiniBand
            line += [
                "--mca",
                "pml",
                "ucx",
                "--mca",
                "opal_common_ucx_tls",
                "any",
                "--mca",
                "opal_common_ucx_devices",
                "any",
            ]
        for name in variables:
            line += ["-x", name]
        if os.geteuid() == 0:
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif tls is not None:  # MPICH talks to its own node by shared memory of its own unless told otherwise
        variables |= {"MPIR_CVAR_NOLOCAL": "1"} if transport == "tcp" else {}
    return [*line, sys.executable, *arguments], variables


def find_launcher() -> tuple[str, str]:
    """Return the launcher and what its --version says; LaunchError where there is none or it does not run."""
    # The launcher beside this Python belongs to the MPI beside this Python.
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    launcher = shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)
    if launcher is None:
        raise LaunchError("mpirun was not found: install Open MPI or MPICH, or start this under your own launcher")
    try:
        version = subprocess.run(
            [launcher, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{launcher} does not run: {error}") from None
    return launcher, version


def launch(
    ranks: int,
    transport: str,
    arguments: Sequence[str],
    timeout_s: float | None,
    settings: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> int:
    """Run `python ARGUMENTS` on that many ranks and return its exit code; LaunchError without a launcher or in time.

    `settings` are variables for the ranks; `quiet` drops what they print on standard output.
    """
    line, variables = command(ranks, transport, arguments, *find_launcher(), settings)
    process = subprocess.Popen(
        line,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet else None,
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"no result after {timeout_s:g} s: the ranks were ended") from None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
