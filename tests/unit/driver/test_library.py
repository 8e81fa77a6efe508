"""Loading the native part, and finding MPI's functions in the very libmpi that mpi4py uses; what is refused."""

import ctypes
import sys
from types import SimpleNamespace

import pytest
from native_parts import address_of, compile_shared, needs_compiler

from trtllm_pp_progress.driver import library as _library
from trtllm_pp_progress.driver.library import DriverUnavailableError, load, mpi_calls
from trtllm_pp_progress.driver.native import NativeDriver
from trtllm_pp_progress.mpi.facts import MpiUnusableError, usable


@needs_compiler
def test_a_build_that_is_absent_broken_or_old_is_named(tmp_path, monkeypatch):
    """The reason goes to status() and doctor as it is."""
    monkeypatch.setattr(_library, "NATIVE", tmp_path)
    with pytest.raises(DriverUnavailableError, match="not built: no C compiler"):
        NativeDriver()
    (tmp_path / "native_thread.abi3.so").write_text("no shared object")
    with pytest.raises(DriverUnavailableError, match="does not load"):
        NativeDriver()
    (tmp_path / "native_thread.abi3.so").unlink()
    (tmp_path / "older.c").write_text("int another_name(void) { return 0; }")
    compile_shared(tmp_path / "older.c", tmp_path / "native_thread.abi3.so")
    with pytest.raises(DriverUnavailableError, match=r"does not load: .*native_version"):
        NativeDriver()


@needs_compiler
def test_a_build_of_another_version_is_refused(tmp_path, monkeypatch):
    """Its structs have other fields."""
    monkeypatch.setattr(_library, "NATIVE", tmp_path)
    (tmp_path / "old.c").write_text("int native_version(void) { return 0; }")
    compile_shared(tmp_path / "old.c", tmp_path / "native_thread.abi3.so")
    with pytest.raises(DriverUnavailableError, match=rf"is version 0, not {_library.VERSION} as needed: reinstall"):
        NativeDriver()


@needs_compiler
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"initialized": False}, "MPI is not initialized"),
        ({"finalized": True}, "MPI is already finalized"),
        ({"level": "SERIALIZED"}, "needs THREAD_MULTIPLE, this MPI runs with SERIALIZED"),
        ({"level": "SINGLE"}, "needs THREAD_MULTIPLE, this MPI runs with SINGLE"),
        ({"file": "/no/such/file"}, "cannot be found through /no/such/file"),
        ({"file": "libc.so.6"}, "MPI_Initialized"),
    ],
)
def test_an_mpi_that_a_second_thread_may_not_enter_is_refused(fake_mpi, facts, reason):
    """Before anything of ours touches it."""
    fake_mpi(**facts)
    with pytest.raises(DriverUnavailableError, match=reason):
        mpi_calls()


def test_a_process_without_mpi_keeps_without_it(monkeypatch):
    """Importing mpi4py.MPI initialises MPI: not for us to do."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(DriverUnavailableError, match="mpi4py is not in use in this process"):
        mpi_calls()
    assert "mpi4py.MPI" not in sys.modules


@needs_compiler
def test_a_libmpi_that_is_linked_but_not_in_use_is_refused(fake_mpi):
    """mpi4py linked to one MPI while another was preloaded: the linked one was never initialized."""
    ctypes.c_int.in_dll(fake_mpi(), "initialized").value = 0
    with pytest.raises(DriverUnavailableError, match="is not in use: is another preloaded"):
        mpi_calls()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_from_an_mpi_process_starts_none(monkeypatch, in_child):
    """MPI is initialized in the child's memory, but it is the parent's."""
    mpi = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)

    def act():
        with pytest.raises(MpiUnusableError, match="forked from one that uses MPI"):
            usable()
        with pytest.raises(DriverUnavailableError, match="forked from one that uses MPI"):
            mpi_calls()
        return True

    assert in_child(act) == 0


# What is found


@needs_compiler
@pytest.mark.parametrize("pointer", [True, False])
def test_functions_and_handle_are_those_of_the_linked_libmpi(fake_mpi, pointer):
    """The size of the handle tells its kind."""
    libmpi = fake_mpi(pointer=pointer)
    calls = mpi_calls()
    assert (calls.iprobe, calls.test) == (address_of(libmpi.MPI_Iprobe), address_of(libmpi.MPI_Test))
    assert (calls.comm, calls.comm_is_pointer, calls.any_source, calls.tag) == (0x4400_0000, pointer, -2, 99)


# The end of MPI


@needs_compiler
@pytest.mark.parametrize("pointer", [True, False])
def test_mpi_finalize_begins_with_our_callback(fake_mpi, pointer):
    """An attribute of COMM_SELF, set once in a process, whoever asks first; a duplicate of COMM_SELF has none."""
    libmpi = fake_mpi(pointer=pointer)
    for _ in range(3):
        mpi_calls()
    assert [ctypes.c_int.in_dll(libmpi, name).value for name in ("keyvals", "attributes")] == [1, 1]
    assert ctypes.c_ssize_t.in_dll(libmpi, "self").value & 0xFFFF_FFFF == 0x4400_0001
    copied = ctypes.c_int(1)
    assert load().not_copied(ctypes.c_ssize_t(1), 7, None, None, None, ctypes.byref(copied)) == 0
    assert copied.value == 0


@needs_compiler
@pytest.mark.parametrize("failing", [1, 2])
def test_an_mpi_that_would_not_tell_of_its_end_is_refused(fake_mpi, failing):
    """Neither the key nor the attribute can be done without; the next one asks again."""
    libmpi = fake_mpi()
    ctypes.c_int.in_dll(libmpi, "failing").value = failing
    with pytest.raises(DriverUnavailableError, match="MPI does not announce its end"):
        mpi_calls()
    ctypes.c_int.in_dll(libmpi, "failing").value = 0
    mpi_calls()
    assert ctypes.c_int.in_dll(libmpi, "keyvals").value == 2


@needs_compiler
@pytest.mark.parametrize("announced", [True, False])
def test_every_thread_leaves_when_mpi_ends(start_native, counter, fake_mpi, announced):
    """At work or asleep, and status says so; without the callback (control) both go on."""
    libmpi = fake_mpi()
    if announced:
        mpi_calls()
    armed, resting = start_native(), start_native()
    armed.driven()
    assert counter.hold_gil(1, 20_000) >= 1
    assert libmpi.MPI_Finalize() == 0
    assert (armed.state, resting.state) == (("stopped", "stopped") if announced else ("armed", "idle"))
    assert (armed.runs, resting.runs) == ((False, False) if announced else (True, True))
    armed.driven()
    resting.driven()
    assert (counter.hold_gil(1, 30) > 0) is not announced
