"""How far the last rank may run ahead of those that receive, and how much a rank may hold back because of it.

A source's broadcast ends once the transport has taken it. What NCCL takes without a receiver is one buffer's slots, by
protocol: a broadcast that fits into a slot fills one. On two and four H200s 8 of 2 KB were taken and the ninth waited.
Where streams share a hardware queue, a broadcast that waits keeps the source's model from running, and so, in the end,
the receiver from posting. Sources: NCCL 2.28, src/include/device.h (NCCL_STEPS, the size of a line, threads), and its
documentation of NCCL_BUFFSIZE and NCCL_PROTO; RCCL has the same slots and fewer threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Transport", "shared_queues", "transport"]

SLOTS = 8  # of a buffer
# Bytes of a protocol's buffer, the variable that sets them, and the part of it that carries data.
PROTOCOLS = {
    "LL": (512 << 10, "NCCL_LL_BUFFSIZE", 1 / 2),
    "LL128": (640 * 120 * 8 * 8, "NCCL_LL128_BUFFSIZE", 15 / 16),
    "SIMPLE": (4 << 20, "NCCL_BUFFSIZE", 1.0),
}
ROCM_LL = 256 << 10
SMALL = 8 << 10  # bytes: what NCCL sends by a low-latency protocol on any fabric, as long as NCCL_PROTO leaves one
# Fewer hardware queues than these and a broadcast may share one with the model.
QUEUES = {"cuda": ("CUDA_DEVICE_MAX_CONNECTIONS", 8, 8), "rocm": ("GPU_MAX_HW_QUEUES", 8, 4)}


@dataclass(frozen=True)
class Transport:
    """What decides how much is held back: `ahead` broadcasts are taken without a receiver, a step has `per_step`."""

    ahead: int
    per_step: int
    shared: str = ""  # the variable by which streams share hardware queues; nothing where each has its own

    def longest_delay(self, rank: int, pp_size: int) -> int:
        """Return the longest delay of a rank, in steps, with which nothing waits that would not wait in vLLM as it is.

        A rank that never holds back more steps than the transport takes never makes the source wait, whatever the
        engine does. Where the model does not wait behind a broadcast, the step in which the last rank has the result is
        early enough as well, as long as steps follow: the rank has posted by then what the last one waits for.
        """
        return self.steps if self.shared else max(self.steps, pp_size - 1 - rank)

    @property
    def steps(self) -> int:
        """How many steps' broadcasts are taken without a receiver."""
        return self.ahead // self.per_step


def transport(environ: Mapping[str, str], platform: str, per_step: int, message_bytes: int) -> Transport:
    """Return what holds for a worker: `per_step` broadcasts a step, the largest of `message_bytes` bytes."""
    slots = max(_slots(environ, platform, name, message_bytes) for name in _protocols(environ, message_bytes))
    return Transport(SLOTS // slots, per_step, shared_queues(environ, platform))


def shared_queues(environ: Mapping[str, str], platform: str) -> str:
    """Return the variable and value by which streams share hardware queues, or nothing where each has its own."""
    variable, enough, default = QUEUES[platform]
    count = _number(environ.get(variable, ""), default)
    return "" if count >= enough else f"{variable}={count}"


def _protocols(environ: Mapping[str, str], message_bytes: int) -> list[str]:
    """Return the protocols that may carry a broadcast; all of them where NCCL_PROTO is not a plain list."""
    said = environ.get("NCCL_PROTO", "").strip().upper()
    named = {name.strip() for name in said.lstrip("^").split(",") if name.strip()}
    left = list(PROTOCOLS)
    if named and named <= set(PROTOCOLS):
        left = [name for name in PROTOCOLS if (name in named) != said.startswith("^")] or left
    elif named:
        return left
    fast = [name for name in left if name != "SIMPLE"]
    return fast if fast and message_bytes <= SMALL else left


def _slots(environ: Mapping[str, str], platform: str, protocol: str, message_bytes: int) -> int:
    """Return how many slots a broadcast fills under a protocol."""
    size, variable, share = PROTOCOLS[protocol]
    default = ROCM_LL if (protocol, platform) == ("LL", "rocm") else size
    room = _number(environ.get(variable, ""), default) * share / SLOTS
    return max(1, -int(-message_bytes // room))


def _number(text: str, default: int) -> int:
    """Return a variable's number, or the default where it is not a positive one, as the libraries take it."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default
