"""The native part, built once, with the stand-ins in the place of MPI."""

import ctypes
import os
import signal
import sys

import pytest
from native_parts import LIMIT_S, Counter, LinkedMpi, build

from trtllm_pp_progress.driver import library as _library
from trtllm_pp_progress.driver.native import NativeDriver

SOON = 1e-4


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Return a folder with the native part and the stand-ins."""
    return build(tmp_path_factory.mktemp("native"))


@pytest.fixture
def counter(built, monkeypatch):
    """Return the counting stand-in, reset; the native part is loaded from the same folder."""
    monkeypatch.setattr(_library, "NATIVE", built)
    return Counter(built)


@pytest.fixture
def start_native(counter):
    """Return a function that starts native drivers; all of them are stopped at the end."""
    started = []

    def start(silence_s=SOON, period_s=SOON, pointer=True, lingers=False):
        started.append(NativeDriver(silence_s, period_s, counter.mpi_calls(pointer), lingers))
        return started[-1]

    yield start
    counter.blocked.value = 0
    assert all(one.stop(LIMIT_S) for one in started)


@pytest.fixture
def fake_mpi(built, monkeypatch):
    """Return a function that puts a stand-in in the place of mpi4py.MPI, and returns its libmpi, reset."""
    monkeypatch.setattr(_library, "NATIVE", built)
    monkeypatch.setattr(_library, "_stopped_at_finalize", False)

    def put(**facts):
        file = facts.pop("file", built / "fake_mpi.so")
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", LinkedMpi(file, **facts))
        libmpi = ctypes.CDLL(str(built / "fake_mpi.so"))
        for name, value in (("initialized", 1), ("keyvals", 0), ("attributes", 0), ("failing", 0)):
            ctypes.c_int.in_dll(libmpi, name).value = value
        return libmpi

    return put


@pytest.fixture
def in_child():
    """Return a function that runs `act` in a forked child and returns its wait status, 0 if `act()` was true."""

    def fork(act):
        pid = os.fork()
        if not pid:
            signal.alarm(10)  # kills the child if it hangs
            code = 1
            try:
                code = 0 if act() else 2
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1]

    return fork
