"""Whether one process may read the memory of another here, as shared memory does for large messages (CMA): tried.

A container's seccomp profile, a user namespace of its own, or the kernel's Yama forbid it; then UCX or Open MPI end in
the middle of a run, or copy twice. The two are siblings, as ranks are: a parent may always read its child.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Mapping

from trtllm_pp_progress.tools.job.child import ask, tell

__all__ = ["look_at_single_copy", "main"]

WORD = b"present"
LIMIT_S = 20.0


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def look_at_single_copy(environ: Mapping[str, str]) -> str | None:
    """Return "works", the name of the error that forbids it (EPERM, ENOSYS), or None where it cannot be told."""
    return ask(__name__, LIMIT_S, environ).said.get("answer")


def main() -> None:
    """Fork two processes, let one read the other, and tell how it went: the child's part."""
    there = ctypes.create_string_buffer(WORD)  # at the same address in both
    owner = os.fork()
    if not owner:
        signal.pause()
    reader = os.fork()
    if not reader:
        os._exit(_read(owner, ctypes.addressof(there)))
    code = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    if code >= 0:
        tell(answer=errno.errorcode.get(code, str(code)) if code else "works")


def _read(owner: int, address: int) -> int:
    """Return 0, or the error number of reading the other's word."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        here = ctypes.create_string_buffer(len(WORD))
        parts = [_Part(ctypes.addressof(here), len(WORD)), _Part(address, len(WORD))]
        got = libc.process_vm_readv(owner, *(x for part in parts for x in (ctypes.byref(part), 1)), 0)
        return 0 if got == len(WORD) and here.raw == WORD else ctypes.get_errno() or errno.EIO
    return errno.ENOSYS
