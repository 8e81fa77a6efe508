"""Ask the UCX that is loaded in this process what it is and which transports it would use, by its own C functions.

Not by the environment alone: UCX reads ucx.conf as well, and a transport named in UCX_TLS need not exist here. Runs in
a child, for a struct of another version could crash it. Source: ucp.h of UCX, whose structures are only appended to.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_pp_progress.tools.job.library import loaded

__all__ = ["ask_ucx", "in_use", "parse_config", "parse_resources"]

FEATURES, TAG = 1, 1  # UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_TAG
MAX_THREAD_LEVEL = 1  # UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL
THREAD_MULTI = 2  # UCS_THREAD_MODE_MULTI
PRINT_CONFIG = 1  # UCS_CONFIG_PRINT_CONFIG


class _LibAttributes(ctypes.Structure):
    _fields_ = (("field_mask", ctypes.c_uint64), ("max_thread_level", ctypes.c_int), ("rest", ctypes.c_char * 1024))


def ask_ucx(path: str) -> dict[str, Any]:
    """Return version, thread safety, settings as UCX has read them, and the transports found, with and without TLS."""
    ucp, libc = ctypes.CDLL(path), ctypes.CDLL(None)
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, numbers))
    attributes = _LibAttributes(field_mask=MAX_THREAD_LEVEL)
    known = hasattr(ucp, "ucp_lib_query") and ucp.ucp_lib_query(ctypes.byref(attributes)) == 0
    found: dict[str, Any] = {
        "version": ".".join(str(number.value) for number in numbers),
        "library": path,
        "thread_safe": attributes.max_thread_level == THREAD_MULTI if known else None,
    }
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)):
        return found
    found |= parse_config(_printed(libc, lambda file: ucp.ucp_config_print(config, file, None, PRINT_CONFIG)))
    parameters = (ctypes.c_uint64 * 128)(FEATURES, TAG)
    version = [ctypes.c_uint(numbers[0].value), ctypes.c_uint(numbers[1].value)]
    for key in ("found", "found_without_tls"):
        if ucp.ucp_init_version(*version, ctypes.byref(parameters), config, ctypes.byref(context)) == 0:
            found[key] = parse_resources(_printed(libc, lambda file: ucp.ucp_context_print_info(context, file)))
        ucp.ucp_config_modify(config, b"TLS", b"all")
    return found


def in_use(copies: list[str], libmpi: str) -> str:
    """Return which of the loaded copies of libucp MPI calls.

    What was preloaded, or loaded for all, comes first for everybody; then what libmpi, or its UCX component, links.
    """
    for owner in (None, libmpi, *loaded("mca_pml_ucx")):
        try:
            address = ctypes.cast(ctypes.CDLL(owner).ucp_get_version, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        if address and (path := _file_at(address)) in copies:
            return path
    return copies[0]


def parse_config(text: str) -> dict[str, Any]:
    """Return UCX_TLS, UCX_RNDV_THRESH and UCX_RNDV_SCHEME out of what `ucp_config_print` prints."""
    values = dict(re.findall(r"^UCX_(TLS|RNDV_THRESH|RNDV_SCHEME)=(.*)$", text, re.MULTILINE))
    return {name.lower(): values.get(name) for name in ("TLS", "RNDV_THRESH", "RNDV_SCHEME")}


def parse_resources(text: str) -> list[str]:
    """Return the names of the transports out of what `ucp_context_print_info` prints."""
    return sorted(set(re.findall(r"resource \d+\s*:.* ([\w]+)/\S+\s*$", text, re.MULTILINE)))


def _file_at(address: int) -> str | None:
    """Return the real path of the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= address < high:
            return os.path.realpath(line.split(maxsplit=5)[-1].strip())
    return None


def _printed(libc: Any, write: Callable[[ctypes.c_void_p], object]) -> str:
    """Return what a C function writes to a FILE."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    write(file)
    libc.fclose(file)
    return (text.value or b"").decode(errors="replace")
