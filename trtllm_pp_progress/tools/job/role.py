"""What a launcher's variables say that this process is, and whether MPI can make it true: every tool asks here.

A launcher tells each process its rank by variables. They may be left from another job (a shell inside Slurm), come from
the launcher of another MPI, or name tasks that MPI has no way to join.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trtllm_pp_progress.tools.job.library import Library

__all__ = ["CLAIMS", "Role", "on_this_host", "role", "without_role"]

# Who says it, the variable with the rank, and the one with the number of ranks where there is one.
CLAIMS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("a PMIx launcher", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("a PMI launcher", "PMI_RANK", "PMI_SIZE"),
    ("Cray's PALS", "PALS_RANKID", "PALS_SIZE"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
PROTOCOLS = {  # by what the ranks find each other, where there is one way
    "OMPI_COMM_WORLD_RANK": frozenset({"pmix"}),
    "PMIX_RANK": frozenset({"pmix"}),
    "PMI_RANK": frozenset({"pmi"}),
}
SLURM_RANK, SLURM_SIZES = "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
# Two launchers share a protocol and a variable; these tell them apart.
KINDS = (
    ("PMI_RANK", "I_MPI_HYDRA_UUID", "Intel MPI's mpiexec"),
    ("PMI_RANK", "HYDI_CONTROL_FD", "MPICH's mpiexec"),
    ("PMI_RANK", SLURM_RANK, "srun --mpi=pmi2"),
    ("PMIX_RANK", SLURM_RANK, "srun --mpi=pmix"),
    ("PMIX_RANK", "PRTE_LAUNCHED", "prterun"),
)
# What tells a process that it is a rank, and what a launcher needs to find it. What configures MPI is none of it:
# a child without OMPI_MCA_pml or PMIX_MCA_psec would not see what a worker sees.
ONES_RANK = re.compile(
    r"PMI_|PMIX_(?!MCA_)|PRTE_|HYD\w_|HYDRA_|MPI_LOCAL|OMPI_MCA_(ess|orte|prte|pmix|num_procs)|MV2_COMM_|PALS_|JSM_"
    r"|OMPI_((COMM|UNIVERSE|WORLD|APP|FILE|FIRST|NUM)_|(ARGV|COMMAND)$)|FLUX_TASK_|I_MPI_HYDRA_"
)
# Where a launcher reads which hosts it may use beside this one.
ALLOCATION = re.compile(r"(SLURM|PBS|LSB|LSF|FLUX|COBALT|OAR|SGE|PE)_")


@dataclass(frozen=True)
class Role:
    """One rank of a job, as its launcher says it by `variables`; `size` is None where it does not say of how many.

    `joins` is false for tasks that were started beside each other without anything that MPI could find them by.
    """

    launcher: str
    variables: dict[str, str]
    rank: int
    size: int | None
    joins: bool = True

    @property
    def said(self) -> str:
        """The variables as one would write them."""
        return ", ".join(f"{name}={value}" for name, value in self.variables.items())

    def trouble(self) -> str | None:
        """Return what keeps this from being one of two ranks or more, in a line with what to do; None if nothing."""
        if not self.joins:
            return (
                f"{self.said} and no PMI or PMIx variable: srun started these tasks beside each other, and MPI would "
                "start alone in each. Use srun --mpi=pmix (srun --mpi=list shows what there is), or one mpirun; "
                f"in a batch script's own shell: {self.unset} COMMAND"
            )
        if self.size == 1:
            return (
                f"{self.said}: this is the only rank of its job, and 2 or more are needed. Start more, or, where the "
                f"variables are left from the job that a shell runs in: {self.unset} COMMAND"
            )
        return None

    def cannot_join(self, library: Library) -> bool:
        """Tell whether it is certain, before MPI starts, that this one cannot join what the launcher has started.

        It would end the process, or start alone in it.
        """
        return not PROTOCOLS.get(next(iter(self.variables)), library.protocols) & library.protocols

    def mismatch(self, library: Library) -> str:
        """Return, in a line, that MPI is alone here although the launcher started more, and what to do."""
        alone = f"{library.name} ({library.path}), which mpi4py loads, is alone here"
        start = f"start them with the launcher of {library.name}"
        if self.size is not None:
            return f"{self.said}: {self.launcher} started {self.size} ranks, but {alone} and cannot join them: {start}"
        left = f"where the variable is left from the job that a shell runs in: {self.unset} COMMAND"
        return f"{self.said}: a rank of {self.launcher}, but {alone}: {start}, or, {left}"

    @property
    def unset(self) -> str:
        """What a command begins with that is to know nothing of this."""
        return "env " + " ".join(f"-u {name}" for name in self.variables)


def role(environ: Mapping[str, str] | None = None) -> Role | None:
    """Return which rank this process is by the variables of its launcher; None where it is none.

    Of several launchers, one inside the other, one that started several ranks counts first: a shell's own job has one.
    Slurm's own variables count where nothing else says anything, and only for more than one task: a batch script and
    a shell inside Slurm have them as well.
    """
    environ = os.environ if environ is None else environ
    found = [claim for launcher, *names in CLAIMS if (claim := _claim(environ, launcher, *names))]
    if found:
        return next((claim for claim in found if (claim.size or 1) > 1), found[0])
    size = next((name for name in SLURM_SIZES if environ.get(name, "").isdigit()), "")
    task = _claim(environ, "srun", SLURM_RANK, size)
    if task is None or (task.size or 1) == 1:
        return None
    return replace(task, joins=any(name.startswith(("PMI_", "PMIX_", "PALS_")) for name in environ))


def without_role(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is no rank; what configures MPI stays."""
    return {name: value for name, value in environ.items() if not ONES_RANK.match(name)}


def on_this_host(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a launcher starts ranks on this host only, whatever job this process is in."""
    return {name: value for name, value in without_role(environ).items() if not ALLOCATION.match(name)}


def _claim(environ: Mapping[str, str], launcher: str, rank: str, size: str) -> Role | None:
    if not environ.get(rank, "").isdigit():
        return None
    launcher = next((name for of, sign, name in KINDS if of == rank and sign in environ), launcher)
    count = environ.get(size, "")
    variables = {name: environ[name] for name in (rank, size) if name in environ}
    return Role(launcher, variables, int(environ[rank]), int(count) if count.isdigit() else None)
