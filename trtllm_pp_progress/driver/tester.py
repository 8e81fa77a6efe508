"""Test a pkl5 send from C, without the GIL: many tests for the price of one call."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from trtllm_pp_progress.driver.library import MOST_REQUESTS, SharedTest, load, mpi_calls

__all__ = ["AS_LONG_AS_IT_TAKES", "NativeTest", "NativeTester"]

AS_LONG_AS_IT_TAKES = 1 << 62  # rounds


class NativeTest:
    """Tests one send at a time; one thread at a time may use it."""

    __slots__ = ("_address", "_call", "_mpi", "_requests", "_shared", "used")

    def __init__(self, call: Any, mpi: Any, function: int, yields: bool) -> None:
        self._call, self._mpi = call, mpi
        self._shared = SharedTest(test=function, yields=yields)
        self._address, self._requests = ctypes.addressof(self._shared), self._shared.requests
        self.used = 0  # tests that the last call made

    def __call__(self, request: Any, rounds: int, limit_s: float, stop: int | None = None) -> bool:
        """Test a pkl5 request at most `rounds` times and for `limit_s`; tell whether it is complete.

        `stop` is the address of a word: tests end once it is not 0. Raises what mpi4py would for an error of MPI.
        """
        shared, requests, address_of = self._shared, self._requests, self._mpi._addressof
        for place, part in enumerate(request):
            requests[place] = address_of(part)
        shared.count, shared.rounds, shared.limit_ns, shared.stop = len(request), rounds, int(limit_s * 1e9), stop
        complete = bool(self._call(self._address))
        self.used = shared.used
        if shared.error:
            raise self._mpi.Exception(shared.error)
        return complete

    @property
    def moved(self) -> bool:
        """Whether one of them took so long that data must have moved."""
        return bool(self._shared.moved)


class NativeTester:
    """Makes NativeTests for requests of the MPI that runs; raises DriverUnavailableError where it cannot."""

    def __init__(self, yields: bool = False) -> None:
        """Take `yields`: whether threads share cores, so that a test in vain lets others run."""
        self._call, self._function, self._yields = load().test, mpi_calls().test, yields
        self._mpi = sys.modules["mpi4py.MPI"]

    def new(self) -> NativeTest:
        """Return a test of its own for whoever holds a lock of its own."""
        return NativeTest(self._call, self._mpi, self._function, self._yields)

    def takes(self, handle: Any) -> bool:
        """Tell whether a handle is a send of mpi4py's, of few enough messages."""
        if not isinstance(handle, tuple) or not 0 < len(handle) <= MOST_REQUESTS:
            return False
        kind = self._mpi.Request
        for part in handle:  # noqa: SIM110  # on upstream's path: a generator costs more than all the rest
            if not isinstance(part, kind):
                return False
        return True
