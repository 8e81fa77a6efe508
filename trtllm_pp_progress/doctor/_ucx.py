"""Ask the UCX that is loaded in this process what it is and which transports it would use, by its own C functions.

Not by the environment alone: UCX reads ucx.conf as well, and a transport named in UCX_TLS need not exist here. Runs in
a child, for a struct of another version could crash it. Source: ucp.h of UCX, whose structures are only appended to.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

__all__ = ["ask_ucx", "parse_config", "parse_resources"]

FEATURES, TAG = 1, 1  # UCP_PARAM_FIELD_FEATURES, UCP_FEATURE_TAG
MAX_THREAD_LEVEL = 1  # UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL
THREAD_MULTI = 2  # UCS_THREAD_MODE_MULTI
PRINT_CONFIG = 1  # UCS_CONFIG_PRINT_CONFIG


class _LibAttributes(ctypes.Structure):
    _fields_ = (("field_mask", ctypes.c_uint64), ("max_thread_level", ctypes.c_int), ("rest", ctypes.c_char * 1024))


def ask_ucx(path: str) -> dict[str, Any]:
    """Return version, thread safety, UCX_TLS and UCX_RNDV_THRESH as UCX has read them, and the transports it found."""
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
    if ucp.ucp_init_version(*version, ctypes.byref(parameters), config, ctypes.byref(context)) == 0:
        found["found"] = parse_resources(_printed(libc, lambda file: ucp.ucp_context_print_info(context, file)))
    return found


def parse_config(text: str) -> dict[str, Any]:
    """Return UCX_TLS and UCX_RNDV_THRESH out of what `ucp_config_print` prints."""
    values = dict(re.findall(r"^UCX_(TLS|RNDV_THRESH)=(.*)$", text, re.MULTILINE))
    return {"tls": values.get("TLS"), "rndv_thresh": values.get("RNDV_THRESH")}


def parse_resources(text: str) -> list[str]:
    """Return the names of the transports out of what `ucp_context_print_info` prints."""
    return sorted(set(re.findall(r"resource \d+\s*:.* ([\w]+)/\S+\s*$", text, re.MULTILINE)))


def _printed(libc: Any, write: Callable[[ctypes.c_void_p], object]) -> str:
    """Return what a C function writes to a FILE."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    write(file)
    libc.fclose(file)
    return (text.value or b"").decode(errors="replace")
