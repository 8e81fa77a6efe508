"""The bench's scenarios: what each puts where, and how parts of several runs become rows. No MPI."""

import itertools

import pytest

from trtllm_pp_progress.tools.bench.rows import merged, quantile
from trtllm_pp_progress.tools.bench.scenarios import ALTERNATIVES, POLICY_NAMES, SCENARIOS, caution


def test_a_name_is_its_own_and_has_one_line():
    """No copy kept the name or the meaning of what it was copied from."""
    assert all(name == scenario.name for name, scenario in SCENARIOS.items())
    meanings = [scenario.meaning for scenario in SCENARIOS.values()]
    assert len(set(meanings)) == len(meanings)
    assert not any("\n" in meaning or meaning.endswith(".") for meaning in meanings)
    assert not set(ALTERNATIVES) & set(POLICY_NAMES)


def test_random_delays_are_the_same_for_every_policy_and_differ_between_ranks():
    """Each run draws from the beginning, so no policy is luckier than another; all are in the range."""
    scenario = SCENARIOS["late_random"]
    runs = [[draw() for _ in range(50)] for draw in (scenario.late(0), scenario.late(0), scenario.late(1))]
    assert runs[0] == runs[1] != runs[2]
    assert all(0 <= late <= 0.05 for late in itertools.chain(*runs))
    assert max(runs[0]) > 0.04
    assert SCENARIOS["late"].late(3)() == 0.02
    assert SCENARIOS["steady"].late(0) is None


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_is_the_last_stage(size):
    """Stage times are 1:1:1:2."""
    times = [SCENARIOS["uneven"].compute(rank, size) for rank in range(size)]
    assert times == [0.002] * (size - 1) + [0.004]


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("steady", [0, 0, 0, 0]),
        ("gil_held", [0, 0, 0, 0.1]),
        ("gil_held_500", [0, 0, 0, 0.5]),
        ("gil_held_all", [0.1] * 4),
    ],
)
def test_who_holds_the_gil(name, holds):
    """The last rank's executor, or everybody's."""
    assert [SCENARIOS[name].holds(rank, 4) for rank in range(4)] == holds


def part(policy, rate, parked, small=()):
    """Return a row as a file has it."""
    rank = {"parked_ms": parked, "polls": 2, "steps": 2, "cpu_cores": 0.5, "reentry_ms": 1.0, "wrong": 1}
    rank["small_ms"] = list(small)
    return {
        "scenario": "steady",
        "policy": policy,
        "payload_bytes": 7,
        "raw": [{"tokens_per_s": rate, "ranks": [rank, rank | {"parked_ms": [], "small_ms": []}]}],
    }


def test_rows_of_several_runs_make_one():
    """Medians over runs, the worst rank's times, every wrong payload counted, raw samples kept; none from none."""
    parts = [part("flush", 1.0, [1.0]), part("eager", 9.0, [9.0]), part("flush", 3.0, [3.0]), part("flush", 8.0, [2.0])]
    row = merged(parts, "flush", "steady")
    assert (row.tokens_per_s, row.parked_ms_p50, row.parked_ms_max, row.wrong) == (3.0, 2.0, 3.0, 6)
    assert (row.pp, row.payload_bytes, row.small_ms_p50) == (2, 7, None)
    assert [run["tokens_per_s"] for run in row.raw] == [1.0, 3.0, 8.0]
    assert merged(parts, "oneshot", "steady") is None
    assert merged(parts, "flush", "late") is None


def test_small_messages_have_their_median_where_there_are_any():
    """Of the rank with the slowest ones."""
    assert merged([part("flush", 1.0, [1.0], [0.3, 0.1, 0.2])], "flush", "steady").small_ms_p50 == 0.2


@pytest.mark.parametrize(("share", "value"), [(0.5, 3), (0.99, 5), (1.0, 5), (0.0, 1)])
def test_quantiles(share, value):
    """Of unsorted values; of none it is 0."""
    assert quantile([5, 1, 4, 2, 3], share) == value
    assert quantile([], share) == 0


def test_where_a_blocking_forward_would_mislead_it_is_said():
    """The executor thread's relay with several requests in flight, and nothing else."""
    assert "inline says nothing of upstream" in caution(SCENARIOS["many"], ["flush", "inline"])
    assert caution(SCENARIOS["many"], ["flush", "patched"]) == ""
    assert caution(SCENARIOS["steady"], ["inline"]) == ""
