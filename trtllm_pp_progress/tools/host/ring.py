"""The model-free stage: takes a stage's time, hands a small activation on, and samples a payload of a given size."""

from __future__ import annotations

import contextlib
import ctypes
import random
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_pp_progress.tools.host.state import Request, Sampled

__all__ = ["RingStage"]

VARIANTS = 4  # payloads in rotation, so that a stale or repeated one is seen


class RingStage:
    """A stage of `compute_s` seconds, outside MPI and with the GIL released, as a host waiting for its GPU is.

    Activations are one byte over TCP. The last rank's payloads are `payload_bytes` random bytes, known to every rank,
    so that each received one is compared in full, in order. With `rendezvous` a stage tells the one before that it is
    about to run, and the one before waits for that in taken(), as a GPU's send does for its receive. `wrap` makes
    the payloads' type of bytes.
    """

    def __init__(
        self,
        before: socket.socket | None,
        after: socket.socket | None,
        compute_s: float,
        payload_bytes: int,
        rendezvous: bool = False,
        wrap: Callable[[bytes], Any] = bytes,
    ) -> None:
        self._before, self._after, self._compute_s = before, after, compute_s
        self._payloads = [wrap(random.Random(seed).randbytes(payload_bytes)) for seed in range(VARIANTS)]
        self._sampled = 0
        self._checked = 0
        self._precise = False
        self._rendezvous = rendezvous

    def receive(self, timeout: float | None) -> bool:
        """Wait for an activation on the socket."""
        if self._before is None:
            return True
        return _byte(self._before, timeout)

    def forward(self, requests: Sequence[Request]) -> Sampled | None:
        """Sleep, then send the activation on or sample."""
        if requests:
            if self._rendezvous and self._before is not None:
                self._before.send(b"t")
            if not self._precise:
                self._precise = _sleep_precisely()
            time.sleep(self._compute_s)
        if self._after is not None:
            self._after.send(b"a")
            return None
        if not requests:
            return None
        step = self._sampled
        self._sampled += 1
        return Sampled([step] * len(requests), self._payloads[step % VARIANTS], step)

    def taken(self, timeout: float | None) -> bool:
        """Wait until the next stage is about to run, where this is a rendezvous."""
        return not self._rendezvous or self._after is None or _byte(self._after, timeout)

    def check(self, host: Sampled) -> int:
        """Compare a received payload with what was sent, and its number with the one due."""
        due = self._checked
        self._checked += 1
        return int(host.step != due or host.payload != self._payloads[due % VARIANTS])

    def release(self, request: Request) -> None:
        """Do nothing: there is no cache."""

    def close(self) -> None:
        """Close both connections."""
        for connection in (self._before, self._after):
            if connection is not None:
                connection.close()


def _byte(connection: socket.socket, timeout: float | None) -> bool:
    if not select.select([connection], [], [], timeout)[0]:
        return False
    if not connection.recv(1):
        raise ConnectionError("a neighbouring stage closed its connection")
    return True


def _sleep_precisely() -> bool:
    """Ask Linux not to round up this thread's sleeps (by 50 us, unasked): a host that waits for its GPU spins."""
    PR_SET_TIMERSLACK = 29
    with contextlib.suppress(OSError, AttributeError):  # not Linux: stages take longer, in every policy alike
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)
    return True
