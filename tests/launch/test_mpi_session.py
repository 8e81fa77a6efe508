"""The MPI session itself: a failing rank ends the job at once, and a session that tested nothing fails."""

import shutil
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "mpi" / "conftest.py"
END_S = 20  # a failure must have ended the job by then
HANG_S = 8

PEER_WAITS = """
def receive_from_nobody():
    MPI.COMM_WORLD.recv(source=MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank, tag=1)
"""
SESSIONS = {
    "test": """
        def test_one_rank_fails_while_its_peer_waits():
            if MPI.COMM_WORLD.rank == 1:
                assert "this rank" == "fails"
            receive_from_nobody()
        """,
    "fixture": """
        @pytest.fixture
        def broken():
            if MPI.COMM_WORLD.rank == 1:
                raise RuntimeError("this rank fails")

        def test_a_fixture_of_one_rank_fails(broken):
            receive_from_nobody()
        """,
    "teardown": """
        @pytest.fixture
        def collective():
            yield
            if MPI.COMM_WORLD.rank == 1:
                raise RuntimeError("this rank fails")
            receive_from_nobody()

        def test_a_teardown_of_one_rank_fails(collective):
            pass
        """,
    "import": """
        if MPI.COMM_WORLD.rank == 1:
            raise RuntimeError("this rank fails")

        def test_the_module_cannot_be_imported_by_one_rank():
            receive_from_nobody()
        """,
    "exit": """
        def test_one_rank_leaves():
            if MPI.COMM_WORLD.rank == 1:
                pytest.exit("this rank fails")
            receive_from_nobody()
        """,
    "pass": """
        def test_right():
            pass
        """,
    "skip": """
        def test_never():
            pytest.skip("not here")

        @pytest.mark.mpi(min_size=64)
        def test_on_a_larger_machine():
            pass
        """,
    "hang": """
        def test_waits_for_ever():
            receive_from_nobody()
        """,
}


@pytest.fixture
def session(job, tmp_path):
    """Return the function that runs one of SESSIONS on ranks, with the conftest of tests/mpi or without."""

    def run(name, *options, ranks=2, deadline=60, conftest=True):
        lines = SESSIONS[name].splitlines()
        body = "\n".join(line.removeprefix(" " * 8) for line in lines)
        text = f"import pytest\nfrom mpi4py import MPI\n{PEER_WAITS}\n{body}\n"
        (tmp_path / f"test_{name}_session.py").write_text(text, encoding="utf-8")
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = mpi\n", encoding="utf-8")
        if conftest:
            shutil.copy(CONFTEST, tmp_path)
        return job(ranks, deadline, "-m", "pytest", tmp_path, "-x", "-p", "no:cacheprovider", *options, cwd=tmp_path)

    return run


@pytest.mark.parametrize("name", ["test", "fixture", "teardown", "import", "exit"])
def test_a_failing_rank_ends_the_run_of_all(session, name):
    """Wherever one rank fails, the job ends before the deadline, says why, and is red."""
    job = session(name, "--with-mpi", deadline=END_S)
    assert job.rc not in (0, 124), job.output
    assert "this rank" in job.output


def test_without_the_conftest_a_failing_rank_hangs_the_run(session):
    """Control: pytest-mpi alone leaves the peer waiting until the deadline kills the job."""
    assert session("test", "--with-mpi", deadline=HANG_S, conftest=False).killed


def test_a_session_in_which_a_test_passed_passes(session):
    """Control for the next ones."""
    job = session("pass", "--with-mpi")
    assert job.rc == 0, job.output


def test_a_session_in_which_every_test_was_skipped_fails(session):
    """Skipped by hand or for want of ranks: nothing was tested."""
    job = session("skip", "--with-mpi")
    assert job.rc not in (0, 124), job.output
    assert "every MPI test was skipped" in job.output


def test_a_session_with_fewer_ranks_than_expected_fails(session):
    """As when the launcher of another MPI starts two times one rank."""
    job = session("pass", "--with-mpi", "--np", "3")
    assert job.rc not in (0, 124), job.output
    assert "2 MPI ranks were started and 3 are expected" in job.output


def test_a_session_without_mpi_collects_nothing(session):
    """An ordinary session does not initialise MPI, and does not pass by running nothing."""
    job = session("pass", ranks=1)
    assert job.rc not in (0, 124), job.output
    assert "no tests ran" in job.output


def test_a_test_that_hangs_shows_its_stack_and_ends_the_job(session):
    """Before any outer deadline, and also where a thread holds the interpreter's lock."""
    job = session("hang", "--with-mpi", "--limit", "3", deadline=END_S)
    assert job.rc not in (0, 124), job.output
    assert "in receive_from_nobody" in job.output
