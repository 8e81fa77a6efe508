"""The doctor under an mpirun whose ranks do not come together."""


def test_a_rank_that_does_not_answer_hides_nothing(job):
    """In time each rank says what it found itself, and exit code 2 that it is not the whole."""
    done = job(2, 60, "tests/launch/scripts/stuck_doctor.py", "doctor", "--timeout", 10)
    assert done.rc == 2, done.output
    assert "the ranks' reports did not come together: it did not get through" in done.output
    assert ": affected: " in done.output or ": unknown: " in done.output
    assert "Traceback" not in done.output
