"""Which MPI library mpi4py loads here: asked of a child that loads it and does not start MPI."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pp_progress.tools.job.child import ask, tell

__all__ = ["Library", "described", "load", "loaded", "main"]


@dataclass(frozen=True)
class Library:
    """An MPI library: who makes it, its version, what it says of itself, and the file it was loaded from."""

    vendor: str
    version: str
    text: str
    path: str

    @property
    def name(self) -> str:
        """Vendor and version."""
        return f"{self.vendor} {self.version}"

    @property
    def protocols(self) -> frozenset[str]:
        """By what it can find the ranks of a launcher's job: pmi, pmix; where it is not known, both."""
        if self.vendor == "Open MPI":
            return frozenset({"pmix"} if int(self.version.split(".")[0]) >= 5 else {"pmi", "pmix"})
        if self.vendor == "MPICH":
            return frozenset({"pmi", "pmix"} if "pmix" in self.text.lower() else {"pmi"})
        return frozenset({"pmi", "pmix"})

    def joins(self, launcher: str) -> bool:
        """Tell whether it can join ranks that the launcher of this MPI starts."""
        return ("pmix" if launcher == "Open MPI" else "pmi") in self.protocols


def load(environ: Mapping[str, str], timeout_s: float = 60.0) -> Library | None:
    """Return the library that a process with this environment loads; None where it loads none, or not in time."""
    said = ask(__name__, timeout_s, environ).said
    return Library(**said) if said else None


def described(mpi: Any) -> Library:
    """Return the library of mpi4py's MPI module, started or not."""
    vendor, numbers = mpi.get_vendor()
    text = mpi.Get_library_version().strip("\0 \n")
    return Library(vendor, ".".join(map(str, numbers)), text, next(iter(loaded("libmpi")), "?"))


def loaded(name: str) -> list[str]:
    """Return the real paths of the copies of a library that are loaded in this process.

    A wheel hashes its names (libucp-2be8eb38.so.0.0.0), and Cray names the compiler (libmpi_gnu_123.so).
    """
    paths = {
        line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    }
    named = re.compile(rf"{name}(ch|_abi|_[a-z]+_\d+|-[0-9a-f]+)?\.so")
    return sorted({os.path.realpath(path) for path in paths if named.match(os.path.basename(path))})


def main() -> None:
    """Load MPI, do not start it, and tell what it is: the child's part."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    tell(**vars(described(MPI)))
    sys.stdout.flush()
    os._exit(0)
