"""Findings about MPI: whether it starts, at which thread level, and what would keep a worker from starting it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtllm_pp_progress.tools.doctor.kinds import Finding, Kind
from trtllm_pp_progress.tools.job.surroundings import LITTLE_MEMLOCK, SMALL_SHM, pmix_settings

__all__ = ["on_mpi"]

OLD_NAMES = ("OMPI_MCA_orte_", "OMPI_MCA_hwloc_base_", "OMPI_MCA_rmaps_base_")

ABSENT = Kind(
    "mpi-absent",
    "error",
    "a Python without mpi4py",
    "mpi4py is not installed here",
    "run the doctor in the workers' environment",
)
TIMEOUT = Kind(
    "mpi-timeout",
    "error",
    "MPI hangs on import",
    "importing MPI hangs ({error})",
    "look for a mix of two MPIs (LD_LIBRARY_PATH, conda) or a launcher's variables of another job",
)
FAILED = Kind(
    "mpi-failed",
    "error",
    "MPI cannot be loaded, or does not start",
    "MPI cannot be imported: {error}",
    "see that LD_LIBRARY_PATH leads to the libmpi that mpi4py was built for, and to the other findings",
)
CRASHED = Kind(
    "mpi-crashed",
    "error",
    "MPI ends the process that imports it",
    "MPI cannot be imported: {error}",
    "see that LD_LIBRARY_PATH leads to the libmpi that mpi4py was built for, and to the other findings",
)
OFF = Kind(
    "mpi-off",
    "error",
    "MPI4PY_RC_INITIALIZE=0, or mpi4py.rc.initialize off",
    "mpi4py is told not to start MPI, so nothing is known of a worker that does",
    "unset MPI4PY_RC_INITIALIZE for the doctor",
    doubt=True,
)
UNASKED = Kind(
    "ucx-unasked",
    "warning",
    "MPI starts, but its UCX cannot be asked",
    "asking UCX failed: {error}",
    "none: the rest of this report holds",
)
LEVEL = Kind(
    "thread-level",
    "error",
    "MPI below MPI_THREAD_MULTIPLE",
    "MPI runs with THREAD_{level}: two threads must not be in MPI, so nothing of ours drives",
    "start mpi4py with THREAD_MULTIPLE (its default: see MPI4PY_RC_THREAD_LEVEL) and an MPI built for it",
)
GIL = Kind(
    "mpi4py-gil",
    "warning",
    "mpi4py up to 4.1.2",
    "mpi4py {mpi4py} duplicates a communicator with the GIL held in its first pickled collective "
    "(mpi4py/mpi4py#784): a late rank then stops every thread",
    "make such collectives once on the main thread before others start, or use a release after 4.1.2",
)
GTL = Kind(
    "cray-gtl",
    "error",
    "Cray MPICH with MPICH_GPU_SUPPORT_ENABLED=1 and a Python that links no GTL",
    "MPI does not start: {line}",
    "unset MPICH_GPU_SUPPORT_ENABLED (sample states are host memory), or LD_PRELOAD libmpi_gtl_cuda.so",
    doubt=True,
)
NO_PMI = Kind(
    "slurm-pmi",
    "error",
    "srun with an Open MPI that was built without Slurm's PMI",
    "MPI does not start under srun: {line}",
    "srun --mpi=pmix, or mpirun in the allocation",
    doubt=True,
)
LOST_PATH = Kind(
    "lost-path",
    "error",
    "OPAL_PREFIX, MPI4PY_LIBMPI and the like left from another image or module",
    "{name}={value} is not here: MPI looks there for its parts",
    "unset {name}, or point it to the MPI that mpi4py loads",
    doubt=True,
)
PMIX = Kind(
    "pmix-settings",
    "info",
    "PMIX_MCA_* handed on into a container (enroot and pyxis do)",
    "{settings}: PMIx ends MPI's start where a component that they name is missing",
    "nothing here, where it starts with them; on a host where it does not, unset them in the container",
)
UNREACHABLE = Kind(
    "pmix-unreachable",
    "error",
    "a container that got PMIX_* but not the folder of the PMIx server's socket",
    "PMIX_SERVER_TMPDIR={folder} is not here: MPI cannot reach its launcher, and fails or starts alone",
    "mount it into the container (srun --container-mounts, podman -v)",
    doubt=True,
)
PMIX_FAILS = "unset {names} in the container, or install the component that they name"
MEMLOCK = Kind(
    "memlock",
    "warning",
    "a low limit on locked memory (ulimit -l)",
    "{limit} KiB may be locked: UCX and libfabric cannot register memory with InfiniBand, RoCE or EFA",
    "ulimit -l unlimited; in containers --ulimit memlock=-1; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
    doubt=True,
)
SHM = Kind(
    "small-shm",
    "warning",
    "a container's default /dev/shm",
    "/dev/shm has {size} MiB: ranks of one host share messages there, and may end or fall back to TCP",
    "--shm-size 1g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm",
)
OLD_SETTINGS = Kind(
    "old-settings",
    "warning",
    "Open MPI 5 with settings of Open MPI 4's launcher, as operators and recipes for TensorRT-LLM set them",
    "{names}: the launcher of Open MPI 5 does not read these: no host but this one may be used, ranks may be bound",
    "PRTE_MCA_prte_default_hostfile, PRTE_MCA_hwloc_default_binding_policy=none, "
    "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
)
WORKER = Kind(
    "ucp-worker",
    "error",
    "UCX cannot start on the fabric",
    "UCX could not create a worker: the fabric or its limits",
    "check the fabric (ibstat, fi_info) and ulimit -l; {here}",
    doubt=True,
)
ENDPOINT = Kind(
    "ucx-endpoint",
    "error",
    "UCX starts and cannot connect",
    "UCX could not connect: {line}",
    "name the interface (UCX_NET_DEVICES) or the transports (UCX_TLS) that the hosts share; {here}",
    doubt=True,
)


def on_mpi(report: dict[str, Any]) -> Iterator[Finding]:
    """Yield what MPI's state means, and what around it may keep a worker's MPI from starting."""
    mpi = report["mpi"]
    broken = {"absent": ABSENT, "timed out": TIMEOUT, "failed": FAILED, "crashed": CRASHED, "off": OFF}
    if mpi["state"] != "ok" and mpi["thread_level"] is None:
        yield broken[mpi["state"]].found(error=mpi["error"])
    elif mpi["state"] != "ok":
        yield UNASKED.found(error=mpi["error"])
    if mpi["thread_level"] not in (None, "MULTIPLE"):
        yield LEVEL.found(level=mpi["thread_level"])
    if mpi["gil_held_duplicate"]:
        yield GIL.found(mpi4py=mpi["mpi4py"])
    yield from _around(report)


def _around(report: dict[str, Any]) -> Iterator[Finding]:
    mpi, around = report["mpi"], report["surroundings"]
    for name, value in around["lost_paths"].items():
        yield LOST_PATH.found(name=name, value=value)
    settings = pmix_settings(report["environment"])
    if settings:
        said = ", ".join(f"{name}={value}" for name, value in settings.items())
        if mpi["thread_level"] is None:
            yield PMIX.found(severity="error", do=PMIX_FAILS, settings=said, names=", ".join(settings))
        else:
            yield PMIX.found(settings=said)
    limit, size = around["memlock_bytes"], around["shm_bytes"]
    if limit is not None and limit <= LITTLE_MEMLOCK:
        yield MEMLOCK.found(limit=limit >> 10)
    if size is not None and size <= SMALL_SHM:
        yield SHM.found(size=size >> 20)
    if folder := around["pmix_folder_missing"]:
        yield UNREACHABLE.found(folder=folder)
    old = [name for name in report["environment"] if name.startswith(OLD_NAMES)]
    if old and mpi["vendor"] == "Open MPI" and int(mpi["version"].split(".")[0]) >= 5:
        yield OLD_SETTINGS.found(names=", ".join(old))
    yield from _said(mpi, "no limit on locked memory" if limit is None else f"locked memory here: {limit >> 10} KiB")


def _said(mpi: dict[str, Any], here: str) -> Iterator[Finding]:
    kinds = {"ucp-worker": WORKER, "ucx-endpoint": ENDPOINT, "cray-gtl": GTL, "slurm-pmi": NO_PMI}
    for name, kind in kinds.items():
        if name in mpi["lines"]:
            yield kind.found(line=mpi["lines"][name], here=here)
