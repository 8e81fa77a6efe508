"""vLLM's real handler and the real policy on simulated GPUs: where posting late hangs, and that ours does not.

Stock and policy run from one plan; on many hardware queues or one, over a transport that takes so many broadcasts
without a receiver, with hosts that keep up or do not.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pp_engine import Load
from sim_pipeline import MANY, ONE, World, hangs, run

BUSY = Load(steps=60, requests=16, arrivals=1.0, empties=0.0, lulls=0.0)
RELEASES = ["", *(str(Path(sys.prefix) / "releases" / name / "pp_utils.py") for name in ("0.28.0", "0.30.0", "0.32.0"))]


def same(world):
    """Demand that a world ends as stock's does, with the same values everywhere; return its outcome."""
    stock, ours = run(world.stock), run(world)
    assert stock.mismatched == ours.mismatched == 0
    assert stock.sampled
    assert (ours.sampled, ours.consumed) == (stock.sampled, stock.consumed)
    return ours


def any_world(seed, **fixed):
    """Return a world by a seed: any size, transport, load and policy; nothing hinders stock in any of them."""
    dice = random.Random(seed)
    size = dice.choice((2, 3, 4, 5, 6, 8))
    load = Load(
        steps=50, requests=dice.choice((1, 2, 4, 8, 16)), arrivals=dice.choice((0.1, 0.5, 0.9)),
        aborts=dice.choice((0.0, 0.05, 0.2)), preemptions=dice.choice((0.0, 0.05)),
        empties=dice.choice((0.0, 0.05, 0.3, 0.6)), skips=dice.choice((0.0, 0.1, 0.4)), lulls=dice.choice((0.0, 0.05)),
        boundaries=dice.choice((0.0, 0.05)), compiles=dice.choice((0.0, 0.1, 0.3)), drains=dice.choice((0.0, 0.1, 0.3)),
        deferrals=dice.choice((0.0, 0.3, 1.0)),
    )  # fmt: skip
    drafts = dice.choice((0, 0, 1, 2, 3))
    releases = RELEASES[:1] + RELEASES[2:] if drafts else RELEASES  # 0.28's own widths do not match with drafts
    world = World(
        size, seed=seed, queues=dice.choice((MANY, ONE)), limit=dice.choice((0, 1, 2, 3, 4, 6, 8, 9)), load=load,
        drafts=drafts, loaded=dice.random() < 0.5, frees=dice.random() < 0.3, depth=dice.choice((0, 0, size)),
        receive=dice.choice(("rank-aware", "rank-aware", *range(1, size))),
        pp_utils=dice.choice(releases),
    )  # fmt: skip
    return replace(world, **fixed)


@pytest.mark.parametrize("chunk", range(8))
def test_what_is_shipped_hangs_nowhere(chunk):
    """In no world, whatever the transport takes, does a policy that knows of it hang or change a value."""
    deferred = 0
    for seed in range(chunk * 10, chunk * 10 + 10):
        deferred += any(same(any_world(seed)).delays)
    assert deferred >= 3  # or it would be too easy


@pytest.mark.parametrize(
    ("limit", "drafts", "receive", "ends"),
    [
        (0, 0, "rank-aware", False),
        (1, 0, "rank-aware", False),
        (2, 0, "rank-aware", True),
        (2, 0, 3, False),
        (4, 0, 3, False),
        (8, 0, 3, True),
        (2, 3, "rank-aware", False),
        (3, 3, "rank-aware", True),
        (8, 3, 3, False),
    ],
)
def test_a_policy_that_knows_nothing_hangs_on_one_queue(limit, drafts, receive, ends):
    """Control: with streams on one hardware queue a policy without a bound needs so many broadcasts to be taken.

    A step's for the rank-aware one; for a delay d on the last rank that receives, d steps'.
    """
    for seed in range(5):
        world = World(4, seed=seed, queues=ONE, limit=limit, drafts=drafts, load=BUSY, receive=receive)
        assert not hangs(world.stock)
        assert hangs(replace(world, shipped=False)) != ends
        same(world)


def test_what_a_longer_pipe_leaves_outstanding_needs_a_bound_as_well():
    """Control: eight stages with drafts, eight broadcasts taken: a fixed delay of seven hangs, ours does not."""
    world = World(8, seed=1, queues=ONE, limit=8, drafts=3, load=BUSY, receive=7)
    assert hangs(replace(world, shipped=False))
    assert max(delay or 0 for delay in same(world).delays) == 2


@pytest.mark.parametrize("receive", ["rank-aware", 3])
def test_many_queues_need_no_buffer(receive):
    """Where a broadcast that waits keeps nothing else from running, rank-aware delays need none, and longer ones go."""
    world = World(4, seed=5, queues=MANY, limit=0, load=replace(BUSY, compiles=0.2), receive=receive)
    assert same(world).delays == [3, 2, 1, None]


def test_a_kernel_load_under_a_delay_without_a_bound_hangs():
    """Control: a host that waits for resident broadcasts, and ranks that post too late for it, on many queues."""
    worlds = [
        World(4, seed=seed, queues=MANY, limit=0, load=replace(BUSY, compiles=0.3), receive=3, shipped=False)
        for seed in range(5)
    ]
    assert any(hangs(world) for world in worlds)
    assert not any(hangs(world.stock) for world in worlds)


@pytest.mark.parametrize("release", RELEASES, ids=["0.33.0", "0.28.0", "0.30.0", "0.32.0"])
@pytest.mark.parametrize("queues", [ONE, MANY])
def test_every_release(release, queues):
    """The handlers differ in widths, masks and what they broadcast; none hangs and none is served other values."""
    drafts = 0 if "0.28" in release else 2  # its own widths do not match with drafts
    for seed in range(3):
        load = Load(steps=60, requests=10, arrivals=0.8, drains=0.1, deferrals=0.2)
        world = World(4, seed=seed, queues=queues, drafts=drafts, load=load, receive="rank-aware", pp_utils=release)
        ours = same(world)
        counters = [status["counters"] for status in ours.statuses]
        assert len({found["collectives"] for found in counters}) == 1
        assert len({found["posts"] for found in counters[:-1]} | {counters[-1]["broadcasts"]}) == 1
        assert all(found["fallbacks"] == 0 for found in counters[:-1])


def test_a_pause_that_keeps_its_requests_is_told():
    """The engine waits for what is under way, and no step follows; untold, ranks would hold back what it waits for."""
    load = replace(BUSY, drains=0.3, compiles=0.3, arrivals=0.5, requests=4)
    worlds = [World(8, seed=seed, queues=MANY, limit=0, load=load, receive="rank-aware") for seed in range(12)]
    for world in worlds:
        same(world)
    assert any(hangs(replace(world, told=False)) for world in worlds)


def test_a_silence_that_nobody_tells_is_noticed():
    """Held back, with no step, on ranks that have nothing to do: let go of at the next look, and the policy goes on."""
    load, ended = replace(BUSY, drains=0.2, compiles=0.1), 0
    for seed in range(12):
        world = World(4, seed=seed, queues=MANY, limit=0, load=load, receive=2, told=False)
        if hangs(world):
            ours = same(replace(world, patience=100))
            assert any(status["counters"]["posts_by_reason"].get("flush_quiet") for status in ours.statuses[:-1])
            assert not any(status["trouble"] for status in ours.statuses)
            ended += 1
    assert ended >= 3


@pytest.mark.parametrize("queues", [ONE, MANY])
def test_nothing_is_taken(queues):
    """On one queue every rank is left as it is, the last one included; on many the rank-aware delays stay."""
    ours = same(World(4, seed=2, queues=queues, limit=1, load=BUSY, receive="rank-aware"))
    assert ours.delays == ([0, 0, 0, 0] if queues == ONE else [3, 2, 1, None])
