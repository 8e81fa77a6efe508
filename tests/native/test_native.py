"""The native part under ThreadSanitizer, and real MPI processes that end in every way."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from native_parts import build

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("exits", HERE / "exits.py")
exits = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(exits)

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the native part needs a C compiler")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Return a folder with the native parts."""
    return build(tmp_path_factory.mktemp("native"))


def test_the_thread_sanitizer_finds_nothing_and_would_find_a_race():
    """ci/tsan.sh compiles with warnings as errors, runs the stress driver and a planted race."""
    ended = subprocess.run([HERE.parents[1] / "ci/tsan.sh", "50"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("tsan: clean, and the planted race was reported\n")


@needs_mpi
@pytest.mark.parametrize("mode", exits.MODES)
def test_no_thread_of_ours_is_in_mpi_once_it_is_finalized(built, mode):
    """Each process keeps its exit code and enters MPI no more; `exits.py 100` is the long run of the same."""
    assert exits.fault(built, mode) == ""


@needs_mpi
@pytest.mark.parametrize("mode", ["normal", "by hand", "in C"])
def test_an_end_that_is_not_announced_is_noticed(built, mode):
    """Control of the test above: without the callback of MPI_Finalize the thread is at work behind it."""
    assert exits.fault(built, mode, "unannounced") != ""


@needs_mpi
def test_an_end_without_mpi_finalize_is_noticed_too(tmp_path):
    """Control of the mode "never": without the exit handler the thread is at work while libraries are taken down."""
    assert exits.fault(build(tmp_path, {"        atexit(stop_all);": ""}), "never") != ""
