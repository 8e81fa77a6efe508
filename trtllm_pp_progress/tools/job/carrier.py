"""What carried the bytes, by the kernel's counters: the transport that was asked for need not be the one in use.

TCP counts what each connection of this process has received; InfiniBand, RoCE and EFA count by port, for a whole host.
What neither of them has counted on one host went through its memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Counted", "carrier", "counted", "mislabelled"]

BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info (linux/tcp.h), since Linux 4.1
PORTS = Path("/sys/class/infiniband")
WORDS = 4  # port_rcv_data counts these many bytes
CARRIERS = {"unknown": "an unknown transport", "rdma": "RDMA", "tcp": "TCP"}
MOST = 0.9  # of the bytes sent: the rest may be counted late


@dataclass(frozen=True)
class Counted:
    """Bytes received so far: over the TCP connections of this process, and over the host's RDMA ports."""

    tcp: int
    rdma: int


def counted() -> Counted:
    """Read the counters; one that cannot be read counts nothing."""
    return Counted(_tcp_bytes(), _rdma_bytes())


def carrier(before: Counted, after: Counted, sent: int, same_host: bool) -> str:
    """Return what carried `sent` bytes between two readings of the receiver: tcp, rdma, memory or unknown."""
    if after.tcp - before.tcp >= MOST * sent:
        return "tcp"
    if after.rdma - before.rdma >= MOST * sent:
        return "rdma"
    return "memory" if same_host else "unknown"


def mislabelled(transport: str, carried: str) -> str | None:
    """Return, in a line, that another transport carried the bytes than was asked for; None where it was that one."""
    wanted = {"tcp": ("tcp",), "shm": ("memory",)}.get(transport, (carried,))
    if carried in wanted:
        return None
    return (
        f"{transport} was asked for, but the bytes went by {CARRIERS.get(carried, carried)}: "
        "this MPI chooses in another way than by UCX_TLS (see its netmod, MTL, fabric or provider)"
    )


def _tcp_bytes() -> int:
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
                    total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


def _rdma_bytes() -> int:
    total = 0
    for name, times in (("counters/port_rcv_data", WORDS), ("hw_counters/rx_bytes", 1)):
        for file in PORTS.glob(f"*/ports/*/{name}"):
            with contextlib.suppress(OSError, ValueError):
                total += times * int(file.read_text())
    return total
