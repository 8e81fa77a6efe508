"""Connections between neighbouring stages beside MPI, over whatever IPv4 network leads from one to the other.

No name is trusted: on Debian a host's own name is 127.0.1.1, elsewhere it is unknown. A rank listens on all its
addresses, the rank before tries all of them at once, and the connection is the one on which the right word comes back:
an address may be that of several hosts, as 127.0.0.1 and docker0's are.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["addresses", "connect_pipeline", "own_address"]

LIMIT_S = 30.0  # for a connection
STRANGER_S = 2.0  # for whoever connects to say the word
WORD = 16  # bytes
SIOCGIFADDR = 0x8915


def connect_pipeline(comm: Any, network: str | None = None) -> tuple[socket.socket | None, socket.socket | None]:
    """Connect each rank with the previous and the next one over TCP, outside MPI; collective, on the main thread.

    Returns (before, after); the first rank has no before, the last no after. Of the ranks' addresses those in `network`
    (as 10.0.0.0/8) are tried, by default all. Raises ConnectionError with what was tried.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    word, before = secrets.token_bytes(WORD), list[socket.socket]()
    with socket.create_server(("", 0), backlog=64) as listener:
        ranks = comm.allgather((addresses(network), listener.getsockname()[1], word))
        # In a thread: the rank before must not wait until this one has reached the next.
        answering = threading.Thread(target=_answer, args=(listener, word, before), daemon=True)
        if rank > 0:
            answering.start()
        after = _reach(rank + 1, *ranks[rank + 1]) if rank < size - 1 else None
        if rank > 0:
            answering.join(LIMIT_S)
            if not before:
                raise ConnectionError(f"rank {rank - 1} did not connect to rank {rank} within {LIMIT_S:g} s")
    return (before[0] if before else None), after


def own_address(comm: Any, hosts: Sequence[str], network: str | None = None) -> str:
    """Return where ranks on other hosts reach this one, as a connection with one of them has shown; collective.

    `hosts` are by rank. 127.0.0.1 where all ranks are on one host. Raises ConnectionError as connect_pipeline().
    """
    rank, far = comm.Get_rank(), ""
    for connection, peer in zip(connect_pipeline(comm, network), (rank - 1, rank + 1), strict=True):
        if connection is not None:
            if hosts[peer] != hosts[rank]:
                far = connection.getsockname()[0]
            connection.close()
    found = comm.allgather(far)  # a rank between two of its own host has seen nothing
    seen = [address for address, host in zip(found, hosts, strict=True) if address and host == hosts[rank]]
    return seen[0] if seen else "127.0.0.1"


def addresses(network: str | None = None) -> list[str]:
    """Return this host's IPv4 addresses, 127.0.0.1 first, or those in a network; ValueError where that is none."""
    found = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    allowed = ipaddress.IPv4Network(network or "0.0.0.0/0")
    return [address for address in dict.fromkeys(found) if ipaddress.IPv4Address(address) in allowed]


def _answer(listener: socket.socket, word: bytes, before: list[socket.socket]) -> None:
    """Repeat the word to the first who says it, and put that connection into `before`."""
    while not before:
        try:
            connection, _ = listener.accept()
        except OSError:  # it was closed
            return
        connection.settimeout(STRANGER_S)
        with contextlib.suppress(OSError):
            if _heard(connection) == word:
                connection.sendall(word)
                before.append(_settled(connection))
                return
        connection.close()


def _reach(rank: int, candidates: Sequence[str], port: int, word: bytes) -> socket.socket:
    """Return a connection to the rank that knows the word, over whichever of its addresses leads there first."""
    reached: queue.Queue[socket.socket | None] = queue.Queue()

    def attempt(address: str) -> None:
        connection = None
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), LIMIT_S)
            connection.sendall(word)
            if _heard(connection) == word:
                reached.put(_settled(connection))
                return
        if connection is not None:
            connection.close()
        reached.put(None)

    for address in candidates:
        threading.Thread(target=attempt, args=(address,), daemon=True).start()
    for _ in candidates:
        if (connection := reached.get()) is not None:
            return connection
    tried = ", ".join(candidates) or "no address"
    raise ConnectionError(f"rank {rank} cannot be reached beside MPI: tried {tried}, port {port}, for {LIMIT_S:g} s")


def _heard(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < WORD and (chunk := connection.recv(WORD - len(data))):
        data += chunk
    return data


def _settled(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
