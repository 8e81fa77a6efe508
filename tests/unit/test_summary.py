"""The sum of a run of ci/test.sh: every test once, every failure named, every skip with its reason."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "ci" / "summary.py"


@pytest.fixture(scope="module")
def summary():
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("ci_summary", FILE)
    module = sys.modules["ci_summary"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["ci_summary"]


def write(folder, name, **outcomes):
    """Write what pytest leaves: a test a keyword, and how it ended."""
    inner = {"passed": "", "failed": "<failure>x</failure>", "error": "<error>x</error>"}
    cases = "".join(
        f'<testcase classname="tests.a" name="{test}">{inner.get(how, f"""<skipped message="{how}"/>""")}</testcase>'
        for test, how in outcomes.items()
    )
    (folder / f"{name}.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")


def test_tests_are_counted_and_named(summary, tmp_path):
    """Passed, failed, errors and skips of two steps; equal reasons together; the last line is plain."""
    (tmp_path / "steps").write_text("unit 12 1 unit tests\nlaunch 300 0 starting mpirun: hangs\n")
    write(tmp_path, "unit", one="passed", two="failed", three="error", four="needs a GPU")
    write(tmp_path, "launch", one="passed", five="needs a GPU", six="only Open MPI")
    assert summary.report(summary.read(tmp_path)) == [
        "   12 s  unit tests: 2 failed, 1 passed, 1 skipped, exit code 1",
        "  300 s  starting mpirun: hangs: 1 passed, 2 skipped",
        "skipped 2: needs a GPU",
        "skipped 1: only Open MPI",
        "FAILED tests/a::two",
        "FAILED tests/a::three",
        "2 passed, 2 failed, 3 skipped",
    ]


def test_ranks_count_once_with_the_worst(summary, tmp_path):
    """A test that one rank failed has failed; on another number of ranks it is another test."""
    (tmp_path / "steps").write_text("mpi 60 1 ranks\nmpich 9 0 MPICH\n")
    write(tmp_path, "mpi-2-0", one="passed", two="passed", three="on rank 1")
    write(tmp_path, "mpi-2-1", one="passed", two="failed", three="passed")
    write(tmp_path, "mpi-3-0", one="passed")
    write(tmp_path, "mpich-0", one="passed")
    lines = summary.report(summary.read(tmp_path))
    assert lines[-2:] == ["FAILED tests/a::two-2", "4 passed, 1 failed, 0 skipped"]


@pytest.mark.parametrize("left", [None, "", "<testsuites>"])
def test_a_step_that_ended_badly_is_a_failure(summary, tmp_path, left):
    """Also where it left no test, or a file that is no longer whole: a deadline, a crash, a check that is no test."""
    (tmp_path / "steps").write_text("checks 3 0 style\nmpi 300 124 ranks\n")
    if left is not None:
        (tmp_path / "mpi-4-0.xml").write_text(left)
    assert summary.report(summary.read(tmp_path))[-2:] == [
        "FAILED ranks: exit code 124",
        "0 passed, 1 failed, 0 skipped",
    ]


def test_nothing_was_run(summary, tmp_path):
    """It still ends with the sum."""
    assert summary.report(summary.read(tmp_path)) == ["0 passed, 0 failed, 0 skipped"]
