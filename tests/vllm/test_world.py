"""vLLM's own PPHandler under every policy, against the same run of stock vLLM: 2 to 4 processes, 400 random steps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pp_engine import Load
from pp_world import Broken, Scenario, compare, everywhere, policy, run

BUSY = Load(requests=12, arrivals=0.9, aborts=0.02, preemptions=0.02, empties=0.0, lulls=0.0)
STEADY = Load(requests=16, arrivals=1.0, aborts=0.0, preemptions=0.0, empties=0.0, skips=0.0, lulls=0.0)
LONELY = Load(requests=1, arrivals=0.3, aborts=0.1, lulls=0.1)

POLICIES = [(size, receive) for size in (2, 3, 4) for receive in [*range(1, size), "rank-aware"]]


def receivers(outcomes):
    return [outcome.status["counters"] for outcome in outcomes[:-1]]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("size", "receive"), POLICIES)
def test_a_policy_changes_nothing_that_the_model_sees(stock_run, size, receive, drafts):
    """Values, slots, steps and the order of collectives are stock's, and nothing is forced or read unfilled."""
    scenario = everywhere(Scenario(size, seed=size * 10 + drafts, load=Load(drafts=drafts)), receive)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    source = outcomes[-1].status["counters"]
    for rank, counters in enumerate(receivers(outcomes)):
        assert counters["posts"] == source["broadcasts"]  # one ledger
        assert counters["fallbacks"] == 0
        assert counters["collectives"] == source["collectives"]
        assert counters["consumed"] > 50
        assert counters["flushes"] > 0
        aware = size - 1 - rank  # as far as a rank may hold back whatever the transport takes
        delay = aware if receive == "rank-aware" else min(receive, max(aware, scenario.ahead // (2 + (drafts > 0))))
        assert max(counters["age_at_post"]) <= delay
        assert counters["age_at_post"][delay] > counters["posts"] / 3
        assert counters["catch_ups"] == 0  # a step that runs no model posts at its end
        assert counters["posts_by_reason"]["empty"] > 0


@pytest.mark.parametrize("warm_up", [0, 6])
@pytest.mark.parametrize("receive", [1, "rank-aware"])
def test_a_kernel_that_is_loaded_for_the_first_time_locks_nothing_up(stock_run, receive, warm_up):
    """A host that waits in the middle of a step for every broadcast that is posted there gets them all, on any rank.

    Also on the last, over a backend that does not buffer: the rank before it can go on for one step and no further, and
    has posted by then what the last one waits for, with a step to spare for one that runs no model.
    """
    scenario = everywhere(Scenario(4, seed=29, load=Load(compiles=0.15, drafts=2), warm_up=warm_up), receive)
    compare(run(scenario), stock_run(scenario))


@pytest.mark.parametrize("load", [BUSY, LONELY], ids=["busy", "lonely"])
def test_a_full_and_an_almost_empty_pipe(stock_run, load):
    """At high concurrency almost nothing is posted by steps without a model; with one request alive almost all is."""
    scenario = everywhere(Scenario(4, seed=5, load=load), "rank-aware")
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    for counters in receivers(outcomes):
        assert (counters["posts_by_reason"].get("empty", 0) < counters["posts"] / 10) == (load is BUSY)


@pytest.mark.parametrize("receive", [1, 3, "rank-aware"])
def test_nothing_is_forced_in_steady_state(stock_run, receive):
    """While every step runs the model, nothing has to be caught up with, let alone posted by the step that consumes."""
    scenario = everywhere(Scenario(4, seed=3, load=STEADY), receive)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    for counters in receivers(outcomes):
        assert counters["posts"] > 300
        assert (counters["fallbacks"], counters["catch_ups"]) == (0, 0)


def test_ranks_may_disagree(stock_run):
    """Every rank has its own policy or none: only each rank's own order counts."""
    policies = (policy(2), None, policy(1), None)
    scenario = Scenario(4, seed=7, load=Load(drafts=2), policies=policies)
    compare(run(scenario), stock_run(scenario))


@pytest.mark.parametrize("warm_up", [0, 6])
def test_the_policy_starts_when_warm_up_has_ended(stock_run, warm_up):
    """Warm-up's collectives go out as ever, and so does the first one after it, which creates the communicator."""
    scenario = everywhere(Scenario(3, seed=3, load=BUSY, warm_up=warm_up), 2)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    steps = len(outcomes[0].collectives) // 2  # tokens and counts
    for counters in receivers(outcomes):
        assert counters["posts_by_reason"]["prime"] == 1
        assert (counters["posts"] == steps) == (warm_up == 0)


def test_calls_between_steps_find_nothing_held_back(stock_run):
    """Sleep, wake-up, synchronise and weight updates, amid live requests, see every collective posted."""
    scenario = everywhere(Scenario(4, seed=11, load=Load(boundaries=0.1)), "rank-aware")
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    reasons = receivers(outcomes)[0]["posts_by_reason"]
    assert {"flush_sleep", "flush_wake_up", "flush_synchronize_device", "flush_update_weights"} <= set(reasons)


def test_a_shutdown_amid_requests_posts_the_rest(stock_run):
    """A worker that goes down with receives saved posts them first, so that the source can end."""
    scenario = everywhere(Scenario(4, seed=13, load=BUSY, abrupt=True), 3)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    assert all("flush_shutdown" in counters["posts_by_reason"] for counters in receivers(outcomes))


@pytest.mark.parametrize("receive", [2, "rank-aware"])
def test_a_last_rank_that_stops_is_named(stock_run, receive):
    """Every rank that receives says, before anything times out, who is waited for and since when."""
    scenario = Scenario(3, seed=31, load=BUSY, stops=60, patience=8.0)
    with pytest.raises(Broken) as broken:
        run(everywhere(scenario, receive, stall_warning_s=1.0))
    for rank in (0, 1):
        line = rf"pipeline rank {rank} of 3, step (\d+): .*broadcast.* for \d+\.\d s .*waits for rank 2 to send it"
        steps = [int(step) for step in re.findall(line, str(broken.value))]
        assert steps, broken.value
        assert 60 <= steps[-1] <= 60 + 4


@pytest.mark.parametrize(("size", "receive"), [(2, 1), (4, "rank-aware")])
def test_vllms_own_model_runner(stock_run, size, receive):
    """The real update_pp_decode_requests and sample_tokens drive the policy as the toy does."""
    scenario = everywhere(Scenario(size, seed=17, load=Load(drafts=2), real_runner=True), receive)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    compare(outcomes, stock_run(replace(scenario, real_runner=False)))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_load_under_any_policies(stock_run, data):
    """Whatever the engine does and whichever policies the ranks have, the model sees what it sees under stock."""
    size = data.draw(st.sampled_from([2, 3, 4]))
    one_policy = st.one_of(
        st.none(),
        st.builds(policy, st.integers(1, size - 1)),
        st.just(policy("rank-aware")),
    )
    chance = st.sampled_from([0.0, 0.02, 0.1, 0.3])
    load = Load(
        steps=120, requests=data.draw(st.integers(1, 12)), arrivals=data.draw(st.sampled_from([0.1, 0.5, 1.0])),
        aborts=data.draw(chance), preemptions=data.draw(chance), empties=data.draw(chance), lulls=data.draw(chance),
        boundaries=data.draw(chance), drafts=data.draw(st.sampled_from([0, 1, 3])),
    )  # fmt: skip
    scenario = Scenario(
        size, seed=data.draw(st.integers(0, 10**6)), load=load, warm_up=data.draw(st.sampled_from([0, 5])),
        policies=tuple(data.draw(st.lists(one_policy, min_size=size, max_size=size))),
    )  # fmt: skip
    compare(run(scenario), stock_run(scenario))
