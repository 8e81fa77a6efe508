"""The tests can fail: every known fault is noticed within its deadline, and costs no more than its own processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pp_engine import Load
from pp_world import Broken, Scenario, compare, everywhere, policy, run

DEADLINE = 60.0
ABORTING = Load(steps=200, requests=2, aborts=0.2)


def verdict(scenario, stock_run):
    compare(run(scenario, DEADLINE), stock_run(replace(scenario, patience=60.0)))


@pytest.mark.parametrize(
    ("sabotage", "scenario", "message"),
    [
        ("stale_event", Scenario(4, load=Load(steps=200)), "poisoned reads"),
        ("lazy_event_alone", Scenario(4, load=ABORTING), "died|differ|did not end"),
        ("no_final_flush", Scenario(3, load=Load(steps=60, lulls=0.0, requests=12), abrupt=True), "did not end"),
        ("no_idle_flush", Scenario(3, load=Load(steps=200, lulls=0.2)), "source resident while idle"),
        ("newest_first", Scenario(4, load=Load(steps=200, drafts=2)), "died|differ|did not end"),
    ],
)
def test_a_fault_is_noticed(stock_run, sabotage, scenario, message):
    """A policy with this fault fails in its own processes, for the reason it should."""
    broken = everywhere(
        replace(scenario, patience=8.0, sabotage=sabotage), 3 if scenario.pp_size == 4 else 2, stall_warning_s=600
    )
    with pytest.raises(Broken, match=message):
        verdict(broken, stock_run)


def test_a_backend_that_blocks_its_source_deadlocks(stock_run):
    """With broadcasts that wait for their receivers a delay of 2 locks the pipe up: why CPU backends are refused."""
    scenario = Scenario(4, load=Load(steps=100, requests=12), blocking=True, patience=8.0)
    scenario = everywhere(scenario, 2, stall_warning_s=600)
    with pytest.raises(Broken, match=r"did not end|never got"):
        verdict(scenario, stock_run)


@pytest.mark.parametrize("delays", [(1, 2, 3, 1), (3, 3, 3, 1)], ids=["grows", "long"])
def test_a_delay_that_is_long_near_the_end_of_the_pipe_locks_up_with_a_kernel_load(stock_run, delays):
    """A host waits for what its neighbour posts only after hearing from it again: why rank-aware is the default."""
    policies = tuple(policy(delay, stall_warning_s=600) for delay in delays)
    scenario = Scenario(4, seed=29, load=Load(compiles=0.15, drafts=2), policies=policies, patience=8.0, ahead=100)
    with pytest.raises(Broken, match=r"did not end|never got"):
        verdict(scenario, stock_run)


@pytest.mark.parametrize("delays", [(1, 2, 3, 1), (3, 3, 3, 1)], ids=["grows", "long"])
def test_a_lock_up_is_unblocked_by_the_watch(stock_run, delays):
    """The same runs with a watch that looks within a second: everything goes out, and every value is stock's."""
    policies = tuple(policy(delay, stall_warning_s=1.0) for delay in delays)
    scenario = Scenario(4, seed=29, load=Load(compiles=0.15, drafts=2), policies=policies, ahead=100)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    reasons = [outcome.status["counters"]["posts_by_reason"] for outcome in outcomes[:-1]]
    assert any(found.get("flush_quiet") or found.get("flush_stall") for found in reasons)


def test_blocking_alone_is_no_deadlock(stock_run):
    """Without activations between the ranks the same run ends: it is their meeting that locks up, not the harness."""
    scenario = everywhere(Scenario(4, load=Load(steps=100), blocking=True, p2p=False), 2)
    verdict(scenario, stock_run)
