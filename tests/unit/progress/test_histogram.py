"""Parked times in buckets: any quantile of any window is right to nine percent."""

import json
import random

import pytest

from trtllm_pp_progress.progress.histogram import Histogram, quantile, since


def counted(*seconds):
    """Return a histogram of these times."""
    histogram = Histogram()
    for one in seconds:
        histogram.count(one)
    return histogram


@pytest.mark.parametrize("seconds", [1e-6, 3.3e-6, 0.0001, 0.002, 0.15, 1.0, 269.0, 86400.0])
def test_a_time_is_found_again(seconds):
    """To nine percent, whatever its size."""
    assert quantile(counted(seconds), 0.5) == pytest.approx(seconds, rel=0.09)


def test_quantiles_of_many_times_are_those_of_the_times():
    """To nine percent, from the shortest to the longest."""
    dice = random.Random(1)
    times = sorted(dice.lognormvariate(-7, 2) for _ in range(5000))
    histogram = counted(*times)
    assert sum(histogram.values()) == 5000
    for share in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert quantile(histogram, share) == pytest.approx(times[int(share * 5000) - 1], rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 9.99e-7, -1.0])
def test_what_is_below_a_microsecond_has_one_bucket(seconds):
    """A clock that went back included."""
    assert counted(seconds) == {0: 1}


def test_buckets_grow_with_the_time():
    """A longer time is never in a lower bucket."""
    buckets = [next(iter(counted(1e-6 * 1.05**power))) for power in range(400)]
    assert buckets == sorted(buckets)


def test_a_window_is_the_difference_of_two_readings():
    """Buckets that did not grow are absent."""
    histogram = counted(0.001, 0.001, 1.0)
    before = dict(histogram)
    for one in (1.0, 5.0):
        histogram.count(one)
    window = since(histogram, before)
    assert sum(window.values()) == 2
    assert quantile(window, 0.01) == pytest.approx(1.0, rel=0.09)
    assert quantile(window, 1.0) == pytest.approx(5.0, rel=0.09)
    assert since(before, before) == {}


def test_nothing_counted_is_no_time():
    """Nothing to divide by."""
    assert quantile({}, 0.5) == 0.0


def test_it_can_be_written_as_json():
    """Its keys become text there, as every JSON reader knows."""
    assert json.loads(json.dumps(counted(0.5))) == {str(key): 1 for key in counted(0.5)}
