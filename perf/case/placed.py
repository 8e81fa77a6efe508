"""What a link is, and the kind that goes through places in a buffer which both ranks see."""

from __future__ import annotations

import socket
from typing import Protocol

import torch

__all__ = ["PIECE", "PLACES", "Link", "LinkError", "Placed"]

PIECE = 2048  # rows in one place: upstream's most tokens of a batch in the published case
PLACES = 8


class LinkError(RuntimeError):
    """A neighbour has gone, or a kind of link cannot be had here."""


class Link(Protocol):
    """One direction; `send` on one rank, `receive` on the next."""

    in_stream_order = False  # whether both only enqueue: then the executor thread itself may call them

    def send(self, rows: torch.Tensor) -> None:
        """Hand rows (n, hidden) on; they may be overwritten in stream order afterwards."""

    def receive(self, rows: torch.Tensor) -> None:
        """Fill rows (n, hidden) with the next n."""

    def close(self) -> None:
        """Give up the connection."""


class Placed:
    """Rows through places in a buffer that both ranks see; subclasses say how a place is written and read."""

    in_stream_order = False

    def __init__(self, signal: socket.socket, places: torch.Tensor) -> None:
        self._signal, self._places = signal, places
        self._free = PLACES  # of use to the sender
        self._next = 0

    def send(self, rows: torch.Tensor) -> None:
        for piece in rows.split(PIECE):
            if not self._free:
                self._await()
                self._free += 1
            self._free -= 1
            place = self._take()
            self._write(place, self._places[place, : len(piece)], piece)
            self._tell()

    def receive(self, rows: torch.Tensor) -> None:
        for piece in rows.split(PIECE):
            self._await()
            place = self._take()
            self._read(place, piece, self._places[place, : len(piece)])
            self._tell()

    def _take(self) -> int:
        place, self._next = self._next, (self._next + 1) % PLACES
        return place

    def _await(self) -> None:
        try:
            told = self._signal.recv(1)
        except OSError as error:
            raise LinkError(f"the neighbouring stage has gone: {error}") from None
        if not told:
            raise LinkError("the neighbouring stage has gone")

    def _tell(self) -> None:
        try:
            self._signal.send(b".")
        except OSError as error:
            raise LinkError(f"the neighbouring stage has gone: {error}") from None

    def _write(self, place: int, there: torch.Tensor, rows: torch.Tensor) -> None:
        raise NotImplementedError

    def _read(self, place: int, rows: torch.Tensor, there: torch.Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._signal.close()
