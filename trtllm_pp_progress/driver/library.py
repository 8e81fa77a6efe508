"""Load the native part, and find in the very libmpi that mpi4py uses what it calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trtllm_pp_progress.mpi.facts import MpiUnusableError, usable

__all__ = ["MOST_REQUESTS", "DriverUnavailableError", "MpiCalls", "SharedTest", "SharedThread", "load", "mpi_calls"]

VERSION = 5  # of the structs in native_thread.c
NATIVE = Path(__file__).parent
NAME = "native_thread"
MOST_REQUESTS = 8


class DriverUnavailableError(RuntimeError):
    """No native driver can run here; the message is the reason, fit for status() and doctor."""


class SharedThread(ctypes.Structure):
    """The head of `struct native_thread`; single aligned words, so a plain store is seen whole by the thread."""

    _fields_ = (
        ("driven_ns", ctypes.c_int64),
        ("timed", ctypes.c_int64),
        ("ticks", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("stopping", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("active_ns", ctypes.c_int64),
        ("silence_ns", ctypes.c_int64),
        ("period_ns", ctypes.c_int64),
        ("iprobe", ctypes.c_void_p),
        ("comm", ctypes.c_ssize_t),
        ("comm_is_pointer", ctypes.c_int64),
        ("any_source", ctypes.c_int64),
        ("tag", ctypes.c_int64),
        ("lingers", ctypes.c_int64),
    )


class SharedTest(ctypes.Structure):
    """`struct native_test`."""

    _fields_ = (
        ("test", ctypes.c_void_p),
        ("requests", ctypes.c_void_p * MOST_REQUESTS),
        ("count", ctypes.c_int64),
        ("stop", ctypes.c_void_p),
        ("rounds", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("yields", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("moved", ctypes.c_int64),
        ("error", ctypes.c_int64),
    )


@dataclass(frozen=True)
class MpiCalls:
    """Where MPI_Iprobe and MPI_Test are, and what the native thread asks the first for, as C values."""

    iprobe: int
    test: int
    comm: int
    comm_is_pointer: bool
    any_source: int
    tag: int


def load() -> SimpleNamespace:
    """Load the native part; raise DriverUnavailableError if it was not built or is of another version."""
    built = [path for suffix in EXTENSION_SUFFIXES if (path := NATIVE / f"{NAME}{suffix}").exists()]
    if not built:
        raise DriverUnavailableError("the native driver was not built: no C compiler when this was installed")
    try:
        library, keeps_gil = ctypes.CDLL(str(built[0])), ctypes.PyDLL(str(built[0]))
        version = library.native_version()
    except (OSError, AttributeError) as error:
        raise DriverUnavailableError(f"the native driver does not load: {error}") from None
    if version != VERSION:
        raise DriverUnavailableError(f"{built[0].name} is version {version}, not {VERSION} as needed: reinstall it")
    library.native_new.restype = ctypes.c_void_p
    library.native_start.argtypes = [ctypes.c_void_p]
    library.native_stop.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.native_test.argtypes = [ctypes.c_void_p]
    # Releasing the GIL here could cost a switch interval to get it back.
    arm, rest = keeps_gil.native_arm, keeps_gil.native_rest
    arm.argtypes, arm.restype = [ctypes.c_void_p, ctypes.c_int64], None
    rest.argtypes, rest.restype = [ctypes.c_void_p], None
    return SimpleNamespace(
        new=library.native_new,
        start=library.native_start,
        stop=library.native_stop,
        test=library.native_test,
        arm=arm,
        rest=rest,
        at_finalize=library.native_at_finalize,
        not_copied=library.native_not_copied,
    )


def mpi_calls() -> MpiCalls:
    """Return where the very libmpi that mpi4py uses has them; the tag is COMM_WORLD's highest, which nobody sends.

    A private duplicate of COMM_SELF would not do: MPICH answers for a communicator of one rank without entering its
    progress engine (seen with 5.0.2; the payload stays parked). An Iprobe takes no message from anybody. The native
    thread is stopped at the beginning of MPI_Finalize, whoever calls it (MPI 4.1, section 11.2.4).

    Raises DriverUnavailableError where they cannot be had for certain.
    """
    mpi, libmpi = _libmpi()
    # Handles are pointers in Open MPI and the MPI 5 ABI, integers in MPICH and its family; their size tells.
    is_pointer = mpi._sizeof(mpi.COMM_WORLD) == ctypes.sizeof(ctypes.c_void_p)
    handle = _handle(mpi, mpi.COMM_WORLD, is_pointer).value
    _stop_at_finalize(mpi, libmpi, is_pointer)
    return MpiCalls(
        _address(libmpi.MPI_Iprobe),
        _address(libmpi.MPI_Test),
        handle,
        is_pointer,
        mpi.ANY_SOURCE,
        mpi.COMM_WORLD.Get_attr(mpi.TAG_UB),
    )


_stopped_at_finalize = False


def _stop_at_finalize(mpi: Any, libmpi: Any, is_pointer: bool) -> None:
    global _stopped_at_finalize
    if _stopped_at_finalize:
        return
    native, key = load(), ctypes.c_int()
    create, set_attribute = libmpi.MPI_Comm_create_keyval, libmpi.MPI_Comm_set_attr
    create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    set_attribute.argtypes = [type(_handle(mpi, mpi.COMM_SELF, is_pointer)), ctypes.c_int, ctypes.c_void_p]
    failed = create(_address(native.not_copied), _address(native.at_finalize), ctypes.addressof(key), None)
    if failed or set_attribute(_handle(mpi, mpi.COMM_SELF, is_pointer), key.value, None):
        raise DriverUnavailableError("MPI does not announce its end: no attribute can be set on COMM_SELF")
    _stopped_at_finalize = True


def _libmpi() -> tuple[Any, Any]:
    try:
        mpi = usable()
    except MpiUnusableError as error:
        raise DriverUnavailableError(str(error)) from None
    initialized = ctypes.c_int(0)
    try:
        # Symbols of a module's handle come from the libraries that module links: never from another libmpi on the path.
        libmpi = ctypes.CDLL(mpi.__file__)
        libmpi.MPI_Initialized(ctypes.byref(initialized))
        _ = libmpi.MPI_Iprobe, libmpi.MPI_Test
    except (OSError, AttributeError) as error:
        raise DriverUnavailableError(f"MPI_Iprobe cannot be found through {mpi.__file__}: {error}") from None
    if not initialized.value:
        raise DriverUnavailableError(f"the libmpi that {mpi.__file__} links is not in use: is another preloaded?")
    return mpi, libmpi


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _handle(mpi: Any, handle: Any, is_pointer: bool) -> Any:
    kind = ctypes.c_ssize_t if is_pointer else ctypes.c_int
    return kind.from_address(mpi._addressof(handle))
