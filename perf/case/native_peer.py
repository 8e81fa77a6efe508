"""Era I's native thread as a peer: MPI_Iprobe for a tag nobody sends, at a fixed interval, all the time."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from case.ids import CaseError

__all__ = ["MpiProgressThread", "build"]

SOURCE = Path(__file__).with_suffix(".c")
CACHE = Path(__file__).resolve().parents[1] / "cache"
FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


class _Peer(ctypes.Structure):
    """`struct peer`, but for the thread at its end."""

    _fields_ = (
        ("iprobe", ctypes.c_void_p),
        ("comm", ctypes.c_ssize_t),
        ("comm_is_pointer", ctypes.c_int64),
        ("any_source", ctypes.c_int64),
        ("tag", ctypes.c_int64),
        ("interval_us", ctypes.c_int64),
        ("stopping", ctypes.c_int64),
        ("probes", ctypes.c_int64),
        ("error", ctypes.c_int64),
    )


@functools.cache
def build() -> Any:
    """Return the library, compiled once into perf/cache; CaseError without a C compiler.

    Ranks that build it together each write a file of their own, and the last one stays.
    """
    target = CACHE / f"native_peer-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise CaseError("the native thread of era I is compiled here, and no C compiler was found (cc, or $CC)")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder, target.name)
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], check=True, timeout=120)
            made.rename(target)
    library = ctypes.CDLL(str(target))
    library.peer_start.argtypes = library.peer_stop.argtypes = [ctypes.c_void_p]
    return library


class MpiProgressThread:
    """The thread, with the names that upstream's has: num_probes, is_running, stop() (idempotent).

    ValueError for an interval of 0 or less. MPI must be at THREAD_MULTIPLE, and is not finalized before stop().
    """

    def __init__(self, comm: Any, interval_us: int, tag: int) -> None:
        if interval_us <= 0:
            raise ValueError(f"interval_us={interval_us} is not valid: more than 0")
        from mpi4py import MPI

        self._library = build()
        kind: Any = ctypes.c_ssize_t if MPI._sizeof(comm) == ctypes.sizeof(ctypes.c_void_p) else ctypes.c_int
        # Symbols of a module's handle come from the libraries that module links: from no other libmpi.
        iprobe = ctypes.cast(ctypes.CDLL(MPI.__file__).MPI_Iprobe, ctypes.c_void_p).value
        self._memory = ctypes.create_string_buffer(self._library.peer_size())
        self._peer = _Peer.from_buffer(self._memory)
        self._peer.iprobe, self._peer.comm = iprobe, kind.from_address(MPI._addressof(comm)).value
        self._peer.comm_is_pointer, self._peer.any_source = kind is ctypes.c_ssize_t, MPI.ANY_SOURCE
        self._peer.tag, self._peer.interval_us = tag, interval_us
        if failed := self._library.peer_start(ctypes.addressof(self._memory)):
            raise RuntimeError(f"the native thread does not start: {os.strerror(failed)}")
        self.is_running = True
        atexit.register(self.stop)

    @property
    def num_probes(self) -> int:
        """How often it has entered MPI."""
        return int(self._peer.probes)

    def stop(self) -> None:
        """End the thread, and wait for it."""
        if self.is_running:
            self.is_running = False
            self._library.peer_stop(ctypes.addressof(self._memory))
            atexit.unregister(self.stop)
        if self._peer.error:
            raise RuntimeError(f"MPI_Iprobe returned {self._peer.error}")
