"""Start the ranks: which launcher is this, and what makes its MPI use the transport that was asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from trtllm_pp_progress.tools.job.output import check_writable
from trtllm_pp_progress.tools.job.role import Role, role

__all__ = ["TRANSPORTS", "LaunchError", "command", "find_launcher", "launch", "made_by", "rank_or_launch"]

# What UCX may use; the default forces nothing. Shared memory mostly hides the fault, TCP shows it.
TRANSPORTS: dict[str, str | None] = {"tcp": "tcp,self", "shm": "posix,sysv,cma,self", "default": None}

OPEN_MPI_ON_UCX = {"pml": "ucx", "opal_common_ucx_tls": "any", "opal_common_ucx_devices": "any"}
# MPICH talks to its own node by shared memory of its own unless told otherwise, and both may go by libfabric.
OTHERS: dict[str, dict[str, dict[str, str]]] = {
    "MPICH": {"tcp": {"MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp"}},
    "Intel MPI": {"tcp": {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp"}, "shm": {"I_MPI_FABRICS": "shm"}},
}


class LaunchError(RuntimeError):
    """The ranks cannot be started; the message says what is missing."""


def rank_or_launch(
    ranks: int, transport: str, arguments: Sequence[str], timeout_s: float | None, result: Path | None = None
) -> Role:
    """Return which rank of a launcher's job this process is; where it is none, it starts the job and never returns.

    The job is `python ARGUMENTS` on that many ranks, and its exit code is this process's. `result` is where rank 0 will
    write. ClickException at once where it cannot, or where a launcher has started this as something that is no rank of
    two or more. LaunchError as launch().
    """
    own = role()
    if own is not None and (trouble := own.trouble()):
        raise click.ClickException(trouble)
    if own is None or own.rank == 0:
        check_writable(result)
    if own is None:
        raise SystemExit(launch(ranks, transport, arguments, timeout_s))
    return own


def made_by(version: str) -> str:
    """Return whose launcher it is that says this when asked for its version; "MPICH" for what is not known better."""
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE")):
        return "Open MPI"
    return "Intel MPI" if "Intel(R) MPI" in version else "MPICH"


def command(
    ranks: int,
    transport: str,
    arguments: Sequence[str],
    launcher: str,
    version: str,
    settings: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the launcher's command line and the variables it needs; `version` is what `launcher --version` says.

    `settings` are variables for the ranks beside the transport's. What really carries the bytes has to be measured: an
    MPI over libfabric, say, need not heed any of it.
    """
    tls, vendor = TRANSPORTS[transport], made_by(version)
    variables = {**({} if tls is None else {"UCX_TLS": tls}), **(settings or {})}
    line = [launcher, "-n", str(ranks)]
    if vendor == "Open MPI":
        # Two ranks get a core each otherwise, for all their threads: one that spins in MPI keeps the others from it.
        line += ["--oversubscribe", "--bind-to", "none"]
        if tls is not None:  # without these Open MPI refuses UCX on anything but InfiniBand
            for name, value in OPEN_MPI_ON_UCX.items():
                line += ["--mca", name, value]
        for name in variables:
            line += ["-x", name]
        if os.geteuid() == 0:
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        variables |= OTHERS[vendor].get(transport, {})
        variables |= {"I_MPI_PIN": "0"} if vendor == "Intel MPI" else {}  # as --bind-to none
    return [*line, sys.executable, *arguments], variables


def find_launcher(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the launcher and what its --version says; LaunchError where there is none or it does not run."""
    environ = os.environ if environ is None else environ
    # The launcher beside this Python belongs to the MPI beside this Python.
    beside = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", "")])
    launcher = shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)
    if launcher is None:
        raise LaunchError("mpirun was not found: install Open MPI or MPICH, or start this under your own launcher")
    try:
        version = subprocess.run(
            [launcher, "--version"], env=_with_its_folder(launcher, environ), capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{launcher} does not run: {error}") from None
    return launcher, version


def _with_its_folder(launcher: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launcher, which may be a script that calls another one beside it."""
    return {**environ, "PATH": os.pathsep.join([str(Path(launcher).parent), environ.get("PATH", "")])}


def launch(
    ranks: int,
    transport: str,
    arguments: Sequence[str],
    timeout_s: float | None,
    settings: Mapping[str, str] | None = None,
    quiet: bool = False,
    silent: bool = False,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run `python ARGUMENTS` on that many ranks and return its exit code; LaunchError without a launcher or in time.

    `settings` are variables for the ranks beside those of `environ`, by default this process's; `quiet` drops what they
    print on standard output, `silent` that on standard error as well.
    """
    environ = os.environ if environ is None else environ
    launcher, version = find_launcher(environ)
    line, variables = command(ranks, transport, arguments, launcher, version, settings)
    process = subprocess.Popen(
        line,
        env={**_with_its_folder(launcher, environ), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if quiet or silent else None,
        stderr=subprocess.DEVNULL if silent else None,
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
