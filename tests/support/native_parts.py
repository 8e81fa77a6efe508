"""The native part, freshly built, and the stand-ins for MPI that its tests drive it with, which need no MPI."""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtllm_pp_progress.driver.library import MpiCalls
from trtllm_pp_progress.mpi.facts import LEVELS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "trtllm_pp_progress/driver/native_thread.c"
COMPILE = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-o"]
LIMIT_S = 20.0  # only a fault makes a wait reach it
LIMIT_MS = int(LIMIT_S * 1e3)

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the native part needs a C compiler")


def compile_shared(source, target):
    """Build one C file as a shared object, warnings being errors."""
    subprocess.run([*COMPILE, target, source], check=True, timeout=60)
    return target


def build(folder, changes=None):
    """Build the native part and the stand-ins into a folder; `changes` replaces text of the first, for a control."""
    text = SOURCE.read_text(encoding="utf-8")
    for old, new in (changes or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "native_thread.c").write_text(text, encoding="utf-8")
    compile_shared(folder / "native_thread.c", folder / "native_thread.abi3.so")
    for name in ("counter", "fake_mpi"):
        compile_shared(ROOT / f"tests/native/{name}.c", folder / f"{name}.so")
    return folder


def address_of(function):
    """Return the address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value


class CountedRequest(ctypes.Structure):
    """`struct counted_request` of counter.c: complete at its `left`-th test."""

    _fields_ = (
        ("left", ctypes.c_int),
        ("error", ctypes.c_int),
        ("us", ctypes.c_int),
        ("tests", ctypes.c_int),
        ("stop", ctypes.c_void_p),
    )


class Counter:
    """The counting stand-in for MPI_Iprobe, reset."""

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(folder / "counter.so"))
        holding = ctypes.PyDLL(str(folder / "counter.so"))
        self.spin = holding.spin
        self.hold_gil = holding.hold
        for name in ("calls", "blocked", "answer", "source", "tag", "busy_us", "fatal"):
            setattr(self, name, ctypes.c_int.in_dll(self.library, name))
            getattr(self, name).value = 0
        self.comm = ctypes.c_ssize_t.in_dll(self.library, "comm")

    def mpi_calls(self, pointer=True):
        """Return the stand-in's functions, with either kind of handle."""
        iprobe = self.library.iprobe_pointer if pointer else self.library.iprobe_integer
        comm = 0x7FFF_1234_5678 if pointer else -0x4400_0000
        return MpiCalls(address_of(iprobe), address_of(self.library.test), comm, pointer, -2, 99)


class MpiError(Exception):
    """What mpi4py raises for an error code."""


class LinkedMpi(SimpleNamespace):
    """The module mpi4py.MPI, linked to a libmpi: initialised, with THREAD_MULTIPLE, unless told otherwise."""

    def __init__(self, file, *, initialized=True, finalized=False, level="MULTIPLE", pointer=True):
        kind = ctypes.c_void_p if pointer else ctypes.c_int
        levels = {f"THREAD_{name}": number for number, name in enumerate(LEVELS)}
        super().__init__(
            __file__=str(file),
            Is_initialized=lambda: initialized,
            Is_finalized=lambda: finalized,
            Query_thread=lambda: levels[f"THREAD_{level}"],
            COMM_WORLD=SimpleNamespace(handle=kind(0x4400_0000), Get_attr=lambda key: {"tag_ub": 99}[key]),
            COMM_SELF=SimpleNamespace(handle=kind(0x4400_0001)),
            TAG_UB="tag_ub",
            ANY_SOURCE=-2,
            Request=CountedRequest,
            Exception=MpiError,
            _sizeof=lambda thing: ctypes.sizeof(thing.handle),
            _addressof=lambda thing: ctypes.addressof(getattr(thing, "handle", thing)),
            **levels,
        )


def native_threads():
    """Return the kernel's folders of the native threads of this process."""
    named = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text() == "pp-progress\n":
                named.add(task)
    return named
