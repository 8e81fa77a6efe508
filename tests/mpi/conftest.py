"""An MPI session: one failing rank ends the run of all at once, and a run that tested nothing fails.

Run as `mpirun -n N python -m pytest tests/mpi --with-mpi -x --np N`, or by ci/mpi.sh. Without --with-mpi nothing here
is collected, so that MPI is not initialised in an ordinary session.
"""

import faulthandler
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.register_assert_rewrite("exchange", "outside", "rings")

_passed = []
_stderr = []  # a descriptor that pytest does not capture


def pytest_addoption(parser):
    """Add --np, the ranks there must be, and --limit, the seconds a test may take."""
    group = parser.getgroup("mpi")
    group.addoption("--np", type=int, default=2, help="Ranks expected: fewer are an error.")
    group.addoption("--limit", type=float, default=100.0, help="Seconds for one test; then all ends, with stacks.")


def _with_mpi(config):
    return config.getoption("--with-mpi", default=False)


def pytest_configure(config):
    """Refuse a session with fewer ranks than expected: a launcher of another MPI starts lonely ranks."""
    if not _with_mpi(config):
        return
    from mpi4py import MPI

    _stderr.append(os.dup(2))
    # Ranks that end together would clear one temporary folder together, which pytest does not survive.
    own = Path(tempfile.gettempdir(), f"pytest-rank-{MPI.COMM_WORLD.Get_rank()}-of-{os.getuid()}")
    own.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(own)
    size, expected = MPI.COMM_WORLD.Get_size(), config.getoption("--np", default=2)
    if size < expected:
        raise pytest.UsageError(f"{size} MPI ranks were started and {expected} are expected: is it this MPI's mpirun?")


def pytest_ignore_collect(config):
    """Leave MPI alone in a session without --with-mpi."""
    return None if _with_mpi(config) else True


def _abort(status):
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)  # MPICH's launcher drops what it has not read when the abort reaches it
    MPI.COMM_WORLD.Abort(int(status) or 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Show the stacks of a test that takes too long and end the process, which ends the job."""
    faulthandler.dump_traceback_later(item.config.getoption("--limit", default=100.0), exit=True, file=_stderr[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Abort on the first failure, before a fixture's collective can wait for ranks that do not come."""
    if report.passed and report.when == "call":
        _passed.append(report.nodeid)
    if report.failed:
        from mpi4py import MPI

        print(f"\nrank {MPI.COMM_WORLD.Get_rank()}: {report.nodeid} failed in {report.when}", file=sys.stderr)
        print(report.longreprtext, *(text for _, text in report.sections), sep="\n", file=sys.stderr)
        _abort(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Fail a session in which no test ran, and abort, after the summary, one that failed any other way."""
    if _with_mpi(session.config) and session.exitstatus == 0 and not _passed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("every MPI test was skipped: nothing was tested", file=sys.stderr)
    result = yield
    if _with_mpi(session.config) and session.exitstatus:
        _abort(session.exitstatus)
    return result


@pytest.fixture
def comm():
    """Return a communicator of this test alone."""
    from mpi4py import MPI

    private = MPI.COMM_WORLD.Dup()
    yield private
    private.Free()


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Return a folder with the native part and the counting stand-in, built for this rank."""
    from mpi4py import MPI
    from native_parts import build

    return build(tmp_path_factory.mktemp(f"native{MPI.COMM_WORLD.rank}"))


@pytest.fixture
def native(built, monkeypatch):
    """Load the native part from where it was just built, and return that folder."""
    from trtllm_pp_progress.driver import library

    monkeypatch.setattr(library, "NATIVE", built)
    monkeypatch.setattr(library, "_stopped_at_finalize", False)
    return built


@pytest.fixture
def shared(comm, tmp_path):
    """Return a folder that every rank of this host sees."""
    return comm.bcast(str(tmp_path))


@pytest.fixture(params=["poll", "native"])
def keeper(request):
    """Return the keeper as a process has it that uses MPI, in each mode, with nothing to keep."""
    from trtllm_pp_progress.mpi.cores import crowded
    from trtllm_pp_progress.progress.keeper import KEEPER

    KEEPER.stop()
    KEEPER._clear()
    KEEPER.start(request.param, crowded())
    yield KEEPER
    KEEPER.stop()
    KEEPER._clear()


@pytest.fixture
def line(comm):
    """Return a connection between the ranks outside MPI."""
    from outside import Line

    connection = Line(comm)
    yield connection
    connection.close()
