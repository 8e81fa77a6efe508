"""The native understudy: pending sends make progress while another thread holds the GIL.

The Python driver tells it of every drive; once the driver has been silent for longer than `silence_s` while a send is
pending, the thread of `native/understudy.c` enters MPI in its place. With nothing pending it sleeps without waking.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

__all__ = [
    "PERIOD_S",
    "SILENCE_S",
    "Probe",
    "Understudy",
    "UnderstudyUnavailable",
    "before_finalize",
    "guard_exits",
    "private_comm",
]

SILENCE_S = 200e-6  # an executor that runs Python for so long keeps the relay from driving
CROWDED_SILENCE_S = 4e-3  # where threads share cores, a look every millisecond takes some 5 % from the ring
PERIOD_S = 400e-6
RECEIVING_SILENCES = 2  # more, for a driver in a receive: it drives from there, unless its message is late
EXIT_TIMEOUT_S = 2.0  # MPI_Iprobe takes microseconds; a thread still inside after this is stuck, and exit goes on
VERSION = 2  # of the struct in understudy.c
NATIVE = Path(__file__).parent / "native"

MPI_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


class UnderstudyUnavailable(RuntimeError):
    """No second driver can run here; the message is the reason, fit for status() and doctor."""


@dataclass(frozen=True)
class Probe:
    """MPI_Iprobe as the native thread calls it: where it is, and its arguments as C values."""

    function: int
    comm: int
    comm_is_pointer: bool
    any_source: int
    tag: int


class _Shared(ctypes.Structure):
    """The head of `struct understudy`; single aligned words, so a plain store is seen whole by the thread."""

    _fields_ = (
        ("driven_ns", ctypes.c_int64),
        ("timed", ctypes.c_int64),
        ("ticks", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("silence_ns", ctypes.c_int64),
        ("period_ns", ctypes.c_int64),
        ("iprobe", ctypes.c_void_p),
        ("comm", ctypes.c_ssize_t),
        ("comm_is_pointer", ctypes.c_int64),
        ("any_source", ctypes.c_int64),
        ("tag", ctypes.c_int64),
    )


_live: weakref.WeakSet[Any] = weakref.WeakSet()
_told: list[Callable[[], object]] = []
_forked_off = False


def guard_exits(driver: Any) -> None:
    """See that `driver` (an Understudy or Parked) is stopped before mpi4py finalizes MPI at exit, and told of a fork.

    atexit runs after non-daemon threads are joined, so they are helped to the last, and before Py_AtExit, which mpi4py
    uses. Keeps the driver alive until it is stopped.
    """
    _live.add(driver)
    atexit.register(driver.stop)


def before_finalize(callback: Callable[[], object]) -> None:
    """Have `callback()` called when someone calls MPI.Finalize by hand; once each, and only where MPI is in use.

    MPI_Finalize deletes the attributes of COMM_SELF first of all, while MPI still works (MPI 4.1, section 11.2.4).
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if callback not in _told and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        _told.append(callback)
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: callback()), None)


def _stop_all() -> None:
    for driver in list(_live):
        driver.stop()


def _forked() -> None:
    global _forked_off
    mpi = sys.modules.get("mpi4py.MPI")
    _forked_off = mpi is not None and mpi.Is_initialized()
    for driver in list(_live):
        driver.forked()


os.register_at_fork(after_in_child=_forked)


def load_library() -> SimpleNamespace:
    """Load the native part; raise UnderstudyUnavailable if it was not built or is of another version."""
    built = [path for suffix in EXTENSION_SUFFIXES if (path := NATIVE / f"understudy{suffix}").exists()]
    if not built:
        raise UnderstudyUnavailable("the native understudy was not built: no C compiler when this was installed")
    try:
        library, keeps_gil = ctypes.CDLL(str(built[0])), ctypes.PyDLL(str(built[0]))
        version = library.understudy_version()
    except (OSError, AttributeError) as error:
        raise UnderstudyUnavailable(f"the native understudy does not load: {error}") from None
    if version != VERSION:
        raise UnderstudyUnavailable(f"{built[0].name} is version {version}, this package needs {VERSION}: reinstall it")
    library.understudy_new.restype = ctypes.c_void_p
    library.understudy_start.argtypes = [ctypes.c_void_p]
    library.understudy_stop.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    # Releasing the GIL here could cost a switch interval to get it back.
    arm, rest = keeps_gil.understudy_arm, keeps_gil.understudy_rest
    for function in arm, rest:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    new, start, stop = library.understudy_new, library.understudy_start, library.understudy_stop
    return SimpleNamespace(new=new, start=start, stop=stop, arm=arm, rest=rest)


def usable_mpi() -> Any:
    """Return mpi4py.MPI if a second thread may enter MPI now; raise UnderstudyUnavailable if not."""
    MPI = sys.modules.get("mpi4py.MPI")  # not imported here: that would initialise MPI in a process that has none
    if MPI is None:
        raise UnderstudyUnavailable("mpi4py is not in use in this process")
    if _forked_off:
        raise UnderstudyUnavailable("this process was forked from one that uses MPI")
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise UnderstudyUnavailable("MPI is not initialized, or already finalized")
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE:
        names = {getattr(MPI, f"THREAD_{name}"): name for name in MPI_THREAD_LEVELS}
        raise UnderstudyUnavailable(f"a second thread in MPI needs THREAD_MULTIPLE, this MPI runs with {names[level]}")
    return MPI


def private_comm() -> Any:
    """Return a duplicate of COMM_SELF that nobody else uses. Local to the rank; call it on the main thread."""
    mpi = usable_mpi()
    before_finalize(_stop_all)
    return mpi.COMM_SELF.Dup()


def mpi_probe() -> Probe:
    """Return MPI_Iprobe of the very libmpi that mpi4py uses, asking COMM_WORLD for the highest tag, which nobody sends.

    A private duplicate of COMM_SELF would not do: MPICH answers for a communicator of one rank without entering its
    progress engine (seen with 5.0.2; the payload stays parked). An Iprobe takes no message from anybody.

    Raises UnderstudyUnavailable where it cannot be had for certain.
    """
    mpi = usable_mpi()
    initialized = ctypes.c_int(0)
    try:
        # Symbols of a module's handle come from the libraries that module links: never from another libmpi on the path.
        libmpi = ctypes.CDLL(mpi.__file__)
        libmpi.MPI_Initialized(ctypes.byref(initialized))
        function = ctypes.cast(libmpi.MPI_Iprobe, ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise UnderstudyUnavailable(f"MPI_Iprobe cannot be found through {mpi.__file__}: {error}") from None
    if not initialized.value or not function:
        raise UnderstudyUnavailable(f"the libmpi that {mpi.__file__} links is not in use: is another preloaded?")
    # Handles are pointers in Open MPI and the MPI 5 ABI, integers in MPICH and its family; their size tells.
    is_pointer = mpi._sizeof(mpi.COMM_WORLD) == ctypes.sizeof(ctypes.c_void_p)
    handle = (ctypes.c_ssize_t if is_pointer else ctypes.c_int).from_address(mpi._addressof(mpi.COMM_WORLD)).value
    before_finalize(_stop_all)
    return Probe(function, handle, is_pointer, mpi.ANY_SOURCE, mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))


class Understudy:
    """Drive MPI from a native thread while a send is pending and the Python driver is silent.

    `silence_s`: how long the driver may be silent before the thread steps in; `period_s`: between two of its calls.
    Raises UnderstudyUnavailable with the reason when it cannot run. Nothing here raises or blocks after that. Any
    thread may call anything; of two that race, the send whose `driven` comes last is watched.
    """

    def __init__(self, silence_s: float = SILENCE_S, period_s: float = PERIOD_S, probe: Probe | None = None) -> None:
        """Start the thread; `probe` is for tests (default: `mpi_probe()`)."""
        self._library = load_library()
        probe = probe or mpi_probe()
        self._address = self._library.new()
        self._shared = shared = _Shared.from_address(self._address)
        shared.silence_ns, shared.period_ns = int(silence_s * 1e9), int(period_s * 1e9)
        shared.iprobe, shared.comm, shared.comm_is_pointer = probe.function, probe.comm, probe.comm_is_pointer
        shared.any_source, shared.tag = probe.any_source, probe.tag
        self._armed_by, self._stopped = 0, ""
        failed = self._library.start(self._address)
        if failed:
            raise UnderstudyUnavailable(f"the native thread does not start: {os.strerror(failed)}")
        guard_exits(self)

    def driven(self) -> None:
        """Note that the driver has just driven and a send is pending; sets the thread's timer unless it is set."""
        thread = get_ident()
        if self._shared.timed and thread == self._armed_by:
            self._shared.driven_ns = monotonic_ns()
        elif not self._stopped:
            self._armed_by = thread
            self._library.arm(self._address)

    def receiving(self) -> None:
        """Note that the driver goes into a receive with a send pending: the thread steps in later."""
        if self._shared.driven_ns:
            self._shared.driven_ns = monotonic_ns() + RECEIVING_SILENCES * self._shared.silence_ns

    def idle(self) -> None:
        """Note that nothing is pending: the thread sleeps on, and its timer is unset."""
        if self._shared.driven_ns and not self._stopped:
            self._library.rest(self._address)

    def stop(self, timeout_s: float = EXIT_TIMEOUT_S) -> bool:
        """Join the thread; return False if it has not left MPI within the timeout. Safe at any time, repeatedly."""
        if not self._stopped:
            if not self._library.stop(self._address, int(timeout_s * 1e9)):
                return False
            self._stopped = "stopped"
            atexit.unregister(self.stop)
        return True

    @property
    def ticks(self) -> int:
        """How often the thread has entered MPI."""
        return int(self._shared.ticks)

    @property
    def state(self) -> str:
        """One of idle, armed, stopped, off after fork, or failed with the MPI error code."""
        if error := self._shared.error:
            return f"failed (MPI_Iprobe returned {error})" if error > 0 else f"failed (timer: {os.strerror(-error)})"
        return self._stopped or ("armed" if self._shared.driven_ns else "idle")

    def forked(self) -> None:
        """Stay off in a forked child: the thread did not come along, and MPI is not to be used here."""
        self._stopped = "off after fork"
        self._shared = _Shared.from_buffer_copy(self._shared)  # the parent's lock may have been held: never touch it
