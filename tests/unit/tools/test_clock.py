"""Moments of another clock in this rank's time, and which transfers they make; and ranks by host, in words."""

import pytest

from trtllm_pp_progress.tools.job.clock import PreviousClock, Reading
from trtllm_pp_progress.tools.job.hosts import listed

HOUR = 3600.0


def clock(before, after, error=1e-4):
    """Return a clock that was so far ahead at the moments 100 and 200."""
    return PreviousClock(Reading(100.0, before, error), Reading(200.0, after, 2 * error))


@pytest.mark.parametrize("ahead", [HOUR, -HOUR, 0.01])
def test_a_moment_of_a_clock_that_is_ahead_is_set_back(ahead):
    """Between the readings and after them; the error is the larger one."""
    other = clock(ahead, ahead)
    assert not other.same
    assert other.error == 2e-4
    assert other.drift == 0
    for moment in (100.0, 150.0, 220.0):
        assert other.here(moment + ahead) == pytest.approx(moment, abs=1e-9)


def test_a_drift_is_spread_over_the_time_between():
    """One second in a hundred, which is more than the errors explain."""
    other = clock(HOUR, HOUR + 1)
    assert other.drift == pytest.approx(0.01)
    assert other.here(150.0 + HOUR + 0.5) == pytest.approx(150.0, abs=0.01)
    assert other.here(200.0 + HOUR + 1) == pytest.approx(200.0, abs=0.02)


def test_what_the_errors_explain_is_no_drift():
    """It is not reported; moments are as the readings say all the same."""
    other = clock(HOUR, HOUR + 2.9e-4)
    assert other.drift == 0
    assert other.here(200.0 + HOUR + 2.9e-4) == pytest.approx(200.0, abs=1e-5)


@pytest.mark.parametrize(("before", "after", "same"), [(0, 0, True), (1e-4, -2e-4, True), (1e-4, -3e-4, False)])
def test_a_clock_is_the_same_unless_a_reading_speaks_against_it(before, after, same):
    """Then its moments are taken as they are, and nothing is uncertain."""
    other = clock(before, after)
    assert other.same == same
    if same:
        assert (other.error, other.drift, other.here(123.0)) == (0, 0, 123.0)


def test_who_runs_where_in_words():
    """In the order of ranks."""
    assert listed(["a", "b", "a", "c"]) == "0/2 on a; 1 on b; 3 on c"
