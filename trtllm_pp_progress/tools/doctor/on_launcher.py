"""Findings about the launcher: what it says that this process is, and whether its ranks can find each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtllm_pp_progress.tools.doctor.kinds import Finding, Kind

__all__ = ["MISMATCH", "SOME_UNPATCHED", "on_launcher"]

MISMATCH = Kind(
    "launcher-mismatch",
    "error",
    "mpirun of one MPI, mpi4py on another",
    "{said}: {launcher} started this process, but mpi4py loads {library}, which cannot join its ranks: "
    "each would be rank 0 of 1",
    "start the ranks with the launcher of {library}, or install an mpi4py for the launcher's MPI",
    doubt=True,
)
TASKS = Kind(
    "slurm-singletons",
    "error",
    "plain srun, or an --mpi plugin that this MPI does not know",
    "{said} and no PMI or PMIx variable: these are tasks beside each other, and MPI starts alone in each",
    "srun --mpi=pmix (srun --mpi=list shows what there is), or one mpirun in the allocation",
    doubt=True,
)
ALONE = Kind(
    "launcher-alone",
    "info",
    "a shell inside Slurm, or another launcher's job of one rank",
    "{said}: this process passes for the only rank of a job; probe and bench do not start one of their own in it",
    "to start ranks from here: {unset} COMMAND",
)
OTHER = Kind(
    "launcher-other",
    "warning",
    "an mpirun on the PATH that is not that of mpi4py's library",
    "{path} is {made_by}'s, but mpi4py loads {library}: ranks that it starts would each be alone",
    "start ranks with the launcher of {library}",
)
SOME_UNPATCHED = Kind(
    "some-unpatched",
    "error",
    "under mpirun or srun: variables that reached some ranks only, as those of the first pod or host",
    "{unpatched}",
    "give those ranks what the others have: `mpirun -x TRTLLM_PP_PROGRESS`, `mpiexec -genvlist TRTLLM_PP_PROGRESS`, "
    "`srun --export=ALL`, and the same packages",
)


def on_launcher(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield what the launcher's word means here."""
    launcher, mpi = report["launcher"], report["mpi"]
    library = f"{mpi['vendor']} {mpi['version']}"
    if launcher["problem"] == "mismatch":
        yield MISMATCH.found(said=launcher["said"], launcher=launcher["name"], library=library)
    elif launcher["problem"] == "tasks":
        yield TASKS.found(said=launcher["said"])
    elif launcher["problem"] == "alone":
        yield ALONE.found(said=launcher["said"], unset=launcher["unset"])
    elif launcher["problem"] == "other":
        yield OTHER.found(path=launcher["path"], made_by=launcher["made_by"], library=library)
