"""How many cores a rank has: by its mask, by its control groups, and once TensorRT-LLM has set the mask anew.

Source of the last: configuring-cpu-affinity.md of NVIDIA/TensorRT-LLM, and #8805, #18117 and #18701.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AFFINITY", "Cores", "cores", "crowded", "quota", "ranks_here"]

AFFINITY = "TLLM_NUMA_AWARE_WORKER_AFFINITY"  # upstream's: unset, 1, or anything else
# How many ranks share this host, as launchers say it: Open MPI, MPICH and Intel MPI, MVAPICH, PALS, Slurm.
LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


@dataclass(frozen=True)
class Cores:
    """Cores of this process: in its mask, of the machine, and at most (None: no limit) by a quota it may share."""

    allowed: int
    online: int
    quota: float | None
    later: int | None  # in the mask once upstream has set it: None where that is what is near a GPU

    @property
    def now(self) -> float:
        """How many may be used at once."""
        return min(self.allowed, self.quota or math.inf)


def cores(environ: Mapping[str, str], root: Path = Path("/")) -> Cores:
    """Return the cores of the calling thread, and those of a worker with this environment.

    Upstream sets the mask when a worker starts: of its main thread alone up to rc of 2026-08, of every thread since. A
    mask that is not the machine's is cleared where the variable is not set, kept for anything but 1; releases differ.
    """
    allowed, online = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    asked = environ.get(AFFINITY)
    near_a_gpu = asked == "1" or (asked is None and allowed == online)
    later = None if near_a_gpu else online if asked is None else allowed
    return Cores(allowed, online, quota(root), later)


def ranks_here(environ: Mapping[str, str]) -> int:
    """Return how many ranks share this host, by their launcher; 1 where none says."""
    said = [environ[name] for name in LOCAL_SIZES if environ.get(name, "").isdigit()]
    return int(said[0]) if said else 1


def crowded(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the ranks of this host, two busy threads each, have to share the cores that they may use."""
    environ = os.environ if environ is None else environ
    return cores(environ).now < 2 * ranks_here(environ)


def quota(root: Path = Path("/")) -> float | None:
    """Return the cores that this process's control groups allow, or None where none of them limits it.

    The lowest limit of the group and its ancestors counts, as far as they are mounted here; versions 1 and 2. `root` is
    where /proc and /sys are, for tests.
    """
    limits = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that can limit its CPUs, and of their ancestors."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in mounts:
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), (*right.split(), "", "", "")[:3]
        if kind != "cgroup2" and not (kind == "cgroup" and "cpu" in options.split(",")):
            continue
        mount = root / fields[4].lstrip("/")
        own = _membership(memberships, kind)
        # A container that sees the host's path has its own group mounted: the path begins with the mount's root.
        below = os.path.relpath(own, fields[3]) if own.startswith(fields[3]) else "."
        folder = mount / below
        yield folder
        while folder != mount and mount in folder.parents:
            folder = folder.parent
            yield folder


def _membership(lines: list[str], kind: str) -> str:
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (kind == "cgroup2" and number == "0") or (kind == "cgroup" and "cpu" in controllers.split(",")):
            return path
    return "/"


def _limit(folder: Path) -> float | None:
    """Return the limit of one group in cores, as version 2 has it, or version 1; max and -1 are none."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            limit, period = " ".join((folder / name).read_text() for name in files).split()
            cores = int(limit) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
        return cores if cores > 0 else None
    return None
