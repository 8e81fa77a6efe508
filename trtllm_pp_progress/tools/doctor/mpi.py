"""What MPI is here: a child imports it, as one rank alone, with the settings that a rank here would get."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_pp_progress.mpi.facts import level_name
from trtllm_pp_progress.tools.doctor.layer import VERBOSE, select
from trtllm_pp_progress.tools.doctor.ucx import ask_ucx, in_use
from trtllm_pp_progress.tools.job.child import ask, tell
from trtllm_pp_progress.tools.job.library import described, load, loaded
from trtllm_pp_progress.tools.job.role import without_role

__all__ = ["holds_gil", "look_at_mpi", "main"]

LAST_WITH_GIL_HELD = (4, 1, 2)  # mpi4py/mpi4py#784, fixed by #789 (2026-09) after this release
MESSAGES = {  # what libraries say on stderr, under the name of the finding
    "ucx-not-thread-safe": re.compile(r"UCP worker does not support MPI_THREAD_MULTIPLE", re.I),
    "ucp-worker": re.compile(r"Failed to create UCP worker", re.I),
    "ucx-not-available": re.compile(r"(network device|transport)s? '[^\n]*(is|are) not available", re.I),
    "cray-gtl": re.compile(r"GTL library is not linked"),
    "slurm-pmi": re.compile(r"not built with SLURM's PMI support", re.I),
    "ucx-endpoint": re.compile(r"(error|fail)[^\n]*\bendpoint|\bendpoint[^\n]*(fail|timeout|error|unreachable)", re.I),
}


def look_at_mpi(timeout_s: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return vendor, versions, library, thread level, what is selected and what UCX says; whatever could be had."""
    alone = without_role(environ)
    answer = ask(__name__, timeout_s, {**alone, **VERBOSE})
    said = answer.said
    state = "absent" if said.pop("absent", False) else answer.state
    if state in ("failed", "crashed") and "vendor" not in said and (library := load(alone, timeout_s)):
        # It can be loaded and does not start: which one it is matters all the more.
        said |= {"vendor": library.vendor, "version": library.version, "library": library.text, "libmpi": library.path}
    lines = {name: found[0] for name, pattern in MESSAGES.items() if (found := _lines(pattern, answer.printed))}
    return {
        "state": "off" if said.get("off") else state,
        "error": "it is loaded and not started: MPI4PY_RC_INITIALIZE is off" if said.get("off") else answer.error,
        **{name: said.get(name) for name in ("vendor", "version", "library", "libmpi", "mpi4py", "thread_level")},
        "gil_held_duplicate": holds_gil(said["mpi4py"]) if "mpi4py" in said else None,
        **select(said.get("vendor"), said.get("library"), answer.printed, environ),
        "messages": sorted(lines),
        "lines": lines,
        "ucx": said.get("ucx"),
    }


def holds_gil(version: str) -> bool:
    """Tell whether this mpi4py duplicates a communicator with the GIL held, in its first pickled collective."""
    return tuple(map(int, re.findall(r"\d+", version)[:3])) <= LAST_WITH_GIL_HELD


def main() -> None:
    """Import MPI and tell what it is: the child's part."""
    try:
        import mpi4py
    except ImportError as error:
        tell(absent=True, error=str(error))
        sys.exit(1)
    tell(mpi4py=mpi4py.__version__)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        tell(error=" ".join(str(error).split()))
        sys.exit(1)
    library = described(MPI)
    tell(vendor=library.vendor, version=library.version, library=library.text, libmpi=library.path)
    if MPI.Is_initialized():
        tell(thread_level=level_name(MPI))
    else:
        tell(off=True)
    if copies := loaded("libucp"):
        used = in_use(copies, library.path)
        tell(ucx={**ask_ucx(used), "others_loaded": [path for path in copies if path != used], **_installed(copies)})
    # Leaving by the usual way would finalize MPI, which is one more thing that can hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _installed(copies: list[str]) -> dict[str, list[str]]:
    """Return the copies of UCX that packages here bring: a worker that imports one of them has two."""
    site = Path(sysconfig.get_path("purelib"))
    found = {os.path.realpath(path) for form in ("*.libs/libucp[.-]*", "*/lib/libucp.so*") for path in site.glob(form)}
    return {"others_installed": sorted(found - set(copies))}


def _lines(pattern: re.Pattern[str], text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if pattern.search(line)]
