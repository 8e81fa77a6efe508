"""Other releases' handlers, from the files that ci/setup-vllm.sh laid beside the installed one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pp_engine import Load
from pp_world import Scenario, compare, everywhere, run

RELEASES = Path(sys.prefix) / "releases"


CASES = [("0.28.0", 0), *((release, drafts) for release in ("0.30.0", "0.31.0", "0.32.0") for drafts in (0, 2))]


@pytest.mark.parametrize("receive", [3, "rank-aware"])
@pytest.mark.parametrize(("release", "drafts"), CASES)
def test_the_same_adapter_fits(stock_run, release, receive, drafts):
    """A handler with another signature, width, skip rule or draft broadcast is deferred by the same adapter."""
    path = RELEASES / release / "pp_utils.py"
    assert path.exists(), f"{path.name} of {release} is missing: run ci/setup-vllm.sh"
    scenario = everywhere(Scenario(4, seed=23, load=Load(steps=200, drafts=drafts), pp_utils=str(path)), receive)
    outcomes = run(scenario)
    compare(outcomes, stock_run(scenario))
    for outcome in outcomes[:-1]:
        assert outcome.status["counters"]["posts"] > 30
