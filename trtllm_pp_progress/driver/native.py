"""The native driver: pending sends make progress while another thread holds the GIL.

Python tells it of every drive; once nobody has driven for `silence_s` while a send is pending, the thread of
`native_thread.c` enters MPI instead. With nothing pending it sleeps without waking.
"""

from __future__ import annotations

import os
import weakref
from threading import get_ident
from time import monotonic_ns

from trtllm_pp_progress.driver.library import DriverUnavailableError, MpiCalls, SharedThread, load, mpi_calls

__all__ = ["CROWDED_SILENCE_S", "PERIOD_S", "RECEIVING_SILENCES", "SILENCE_S", "NativeDriver"]

SILENCE_S = 200e-6  # an executor that runs Python for so long keeps the relay from driving
CROWDED_SILENCE_S = 4e-3  # where threads share cores, a look every millisecond takes some 5 % from the ring
PERIOD_S = 400e-6
RECEIVING_SILENCES = 2  # more, for a relay in a receive: it drives from there, unless its message is late
EXIT_TIMEOUT_S = 2.0  # MPI_Iprobe takes microseconds; a thread still inside after this is stuck, and we go on

_live: weakref.WeakSet[NativeDriver] = weakref.WeakSet()


class NativeDriver:
    """Drives MPI from a native thread while a send is pending and nobody else drives.

    `silence_s`: how long nobody may have driven before the thread steps in; `period_s`: between two of its calls.
    With `lingers` it looks now and then for a while after the last send, which spares whoever drives two system calls a
    send. Raises DriverUnavailableError with the reason when it cannot run. Nothing here raises or blocks after that.
    Any thread may call anything; of two that race, the send whose `driven` comes last is watched.

    The thread ends with stop(), at the beginning of MPI_Finalize, or with the process: whichever comes first.
    """

    def __init__(
        self,
        silence_s: float = SILENCE_S,
        period_s: float = PERIOD_S,
        calls: MpiCalls | None = None,
        lingers: bool = False,
    ) -> None:
        """Start the thread; `calls` is for tests (default: `mpi_calls()`)."""
        self._library = load()
        calls = calls or mpi_calls()
        self._address = self._library.new()
        self._shared = shared = SharedThread.from_address(self._address)
        shared.silence_ns, shared.period_ns = int(silence_s * 1e9), int(period_s * 1e9)
        shared.iprobe, shared.comm, shared.comm_is_pointer = calls.iprobe, calls.comm, calls.comm_is_pointer
        shared.any_source, shared.tag, shared.lingers = calls.any_source, calls.tag, lingers
        self._armed_by, self._child = 0, False
        failed = self._library.start(self._address)
        if failed:
            raise DriverUnavailableError(f"the native thread does not start: {os.strerror(failed)}")
        _live.add(self)

    def driven(self, planned_s: float = 0.0) -> bool:
        """Note that a send is pending, was driven just now, and will be again in `planned_s` seconds; return `runs`."""
        thread, shared, driven_ns = get_ident(), self._shared, monotonic_ns() + int(planned_s * 1e9)
        # The timer never waits for longer than driven_ns said last: a pause that was cut short sets it anew.
        if shared.timed and thread == self._armed_by and driven_ns >= shared.active_ns:
            shared.driven_ns = shared.active_ns = driven_ns
            if shared.timed:  # still: the thread looks at driven_ns once it has unset its timer
                return not (shared.stopping or shared.error)
        if not self._child:
            self._armed_by = thread
            self._library.arm(self._address, int(planned_s * 1e9))
        return self.runs

    def receiving(self) -> None:
        """Note that the relay goes into a receive with a send pending: the thread steps in later."""
        if self._shared.driven_ns:
            self._shared.driven_ns = monotonic_ns() + RECEIVING_SILENCES * self._shared.silence_ns

    def idle(self) -> None:
        """Note that nothing is pending: the thread sleeps on."""
        shared = self._shared
        if shared.driven_ns and not self._child:
            if shared.lingers:
                shared.driven_ns = 0
            else:
                self._library.rest(self._address)

    def stop(self, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
        """End the thread; return False if it has not left MPI within the timeout. Safe at any time, repeatedly."""
        return self._child or bool(self._library.stop(self._address, int(timeout_s * 1e9)))

    @property
    def ticks(self) -> int:
        """How often the thread has entered MPI."""
        return int(self._shared.ticks)

    @property
    def armed(self) -> bool:
        """Whether a send is pending, as far as the thread was told."""
        return bool(self._shared.driven_ns)

    @property
    def runs(self) -> bool:
        """Whether the thread is there to step in."""
        return not (self._child or self._shared.stopping or self._shared.error)

    @property
    def state(self) -> str:
        """One of idle, armed, stopping, stopped, off after fork, or failed with the MPI error code."""
        shared = self._shared
        if error := shared.error:
            return f"failed (MPI_Iprobe returned {error})" if error > 0 else f"failed (timer: {os.strerror(-error)})"
        if self._child:
            return "off after fork"
        if shared.stopping:
            return "stopped" if shared.done else "stopping"
        return "armed" if self.armed else "idle"

    def forked(self) -> None:
        """Stay off in a forked child: the thread did not come along, and MPI is not to be used here."""
        self._child = True
        self._shared = SharedThread.from_buffer_copy(self._shared)  # its lock may have been held: never touch it


def _forked() -> None:
    for driver in list(_live):
        driver.forked()


os.register_at_fork(after_in_child=_forked)
