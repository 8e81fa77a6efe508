"""Activations between neighbouring stages: gloo point-to-point, outside MPI, with a thread that receives."""

from __future__ import annotations

import contextlib
import queue
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

__all__ = ["Rendezvous", "Wire", "WireError"]

dist: Any = torch.distributed  # its gloo part is not in the type stubs
CONNECT = timedelta(seconds=60)
FOREVER = timedelta(days=365)  # a receive that times out breaks the pair for good: it must not
FAREWELL = timedelta(seconds=5)  # longest wait in close() for each neighbour
CLOSE = -1
HEADER = 8  # bytes: one int64, the number of rows, or CLOSE
INLINE = 4  # rows that travel in the header's own message: one wake-up less for each decode step


class WireError(RuntimeError):
    """The connection with a neighbouring stage has failed or ended."""


class Rendezvous:
    """Where the stages of one pipeline find each other: a store at an address of this host, kept until all closed."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"


class Wire:
    """The connection of stage `rank` of `size` with its neighbours; `shape` is a row's length and its dtype.

    Construction is collective: it waits at most a minute for the other stages. `send` and `receive` are for one thread
    (the executor's); a second, daemon thread sits in the blocking receive, so that a timeout never touches the pair.
    `here` is the address at which the neighbours reach this stage. A pipeline of one stage connects to nothing.
    """

    def __init__(
        self, rank: int, size: int, address: str, row: int, dtype: torch.dtype, here: str = "127.0.0.1"
    ) -> None:
        self._rank, self._size, self._row, self._dtype = rank, size, row, dtype
        self._inline = INLINE * row * dtype.itemsize
        self._arrived: queue.Queue[torch.Tensor | WireError] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closed = False
        if size > 1:
            self._group = self._connect(address, here)
        if rank > 0:
            self._thread = threading.Thread(target=self._receive_loop, name="activation-receiver", daemon=True)
            self._thread.start()

    def _connect(self, address: str, here: str) -> Any:
        host, _, port = address.rpartition(":")
        # A group of its own, not torch's default one: that stays free, and a process may build pipelines repeatedly.
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
        options._timeout = CONNECT
        try:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=CONNECT)
            return dist.ProcessGroupGloo(store, self._rank, self._size, options)
        except (RuntimeError, ValueError) as error:
            raise WireError(f"stage {self._rank} found no pipeline at {address!r}: {_line(error)}") from None

    def send(self, rows: torch.Tensor) -> None:
        """Hand rows, shape (n, row), to the next stage; returns when its thread has taken them. n may be 0."""
        rows = rows.detach().to("cpu", self._dtype).contiguous()
        self._post(len(rows), rows)

    def _post(self, count: int, rows: torch.Tensor | None, timeout: timedelta = FOREVER) -> None:
        frame = torch.zeros(HEADER + self._inline, dtype=torch.uint8)
        frame[:HEADER].view(torch.int64)[0] = count
        payload = None
        if rows is not None and count:
            payload = rows.view(torch.uint8).reshape(-1)
            if count <= INLINE:
                frame[HEADER : HEADER + len(payload)] = payload
        try:
            self._group.send([frame], self._rank + 1, 0).wait(timeout)
            if payload is not None and count > INLINE:
                self._group.send([payload], self._rank + 1, 0).wait(timeout)
        except RuntimeError as error:
            raise WireError(f"stage {self._rank} cannot send to the next one: {_line(error)}") from None

    def receive(self, timeout: float | None) -> torch.Tensor | None:
        """Return the next rows from the previous stage, None after `timeout` seconds; WireError when it has gone."""
        try:
            arrived = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(arrived, WireError):
            self._arrived.put(arrived)  # for whoever asks again
            raise arrived
        return arrived

    def _receive_loop(self) -> None:
        frame = torch.empty(HEADER + self._inline, dtype=torch.uint8)
        try:
            while True:
                self._group.recv([frame], self._rank - 1, 0).wait(FOREVER)
                count = int(frame[:HEADER].view(torch.int64)[0])
                if count == CLOSE:
                    self._arrived.put(WireError(f"stage {self._rank - 1} has closed its wire"))
                    return
                size = count * self._row * self._dtype.itemsize
                if count <= INLINE:
                    payload = frame[HEADER : HEADER + size].clone()
                else:
                    payload = torch.empty(size, dtype=torch.uint8)
                    self._group.recv([payload], self._rank - 1, 0).wait(FOREVER)
                self._arrived.put(payload.view(self._dtype).reshape(count, self._row))
        except RuntimeError as error:
            self._arrived.put(WireError(f"stage {self._rank} lost the previous one: {_line(error)}"))

    def close(self) -> None:
        """Say farewell to the next stage and wait a few seconds for the previous one's; safe to call twice.

        A neighbour that is gone or never closes does not keep this process: the thread is left behind, a daemon.
        """
        if self._closed:
            return
        self._closed = True
        if self._rank < self._size - 1:
            with contextlib.suppress(WireError):  # it has gone already
                self._post(CLOSE, None, FAREWELL)
        if self._thread is not None:
            self._thread.join(FAREWELL.total_seconds())


def _line(error: Exception) -> str:
    """Return the first line of an error: gloo's own go on for a page."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
