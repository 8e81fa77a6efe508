"""The rule alone: what is posted when, in which order, for any sequence of steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pp_progress.vllm._policy import POST_MODEL, PRE_MODEL, Deferral, State, Tally, delay_for

POLICIES = [
    (depth, delay, placement)
    for depth in range(2, 9)
    for delay in range(1, depth)
    for placement in (PRE_MODEL, POST_MODEL)
]


class Rank:
    """A deferral that is led through steps, with a log of what it posts."""

    def __init__(self, depth, delay, placement):
        self.log = []
        self.deferral = Deferral(depth, delay, placement, self.post)
        self.point = "start"

    def post(self, step):
        self.log.append((step, self.deferral.step, self.point))

    def step(self, receives=True, runs=True):
        self.point = "start"
        consumed = self.deferral.begin_step()
        if runs:
            self.point = "model"
            self.deferral.after_model()
            if receives:
                self.deferral.save(self.deferral.step)
        return consumed


@pytest.mark.parametrize(("depth", "delay", "placement"), POLICIES)
def test_a_busy_pipe_posts_every_receive_at_its_delay(depth, delay, placement):
    """After the first, each receive goes out exactly `delay` steps after it was saved, at the placement's point."""
    rank = Rank(depth, delay, placement)
    consumed = [rank.step() for _ in range(40)]
    assert rank.log[0] == (1, 1, "model")
    expected = [(step, step + delay, "start" if placement == PRE_MODEL else "model") for step in range(2, 41 - delay)]
    assert rank.log[1:] == expected
    assert [receive and receive.payload for receive in consumed] == [None] * depth + list(range(1, 41 - depth))
    assert rank.deferral.tally.posts == {"prime": 1, "due": len(expected)}


@given(
    policy=st.sampled_from(POLICIES),
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), max_size=120),
)
def test_order_and_completeness_hold_for_any_steps(policy, steps):
    """Whatever steps are empty, skip their receive or see a flush: in order, once each, before consumption."""
    rank = Rank(*policy)
    saved = []
    for receives, runs, dice in steps:
        consumed = rank.step(receives, runs)
        if receives and runs:
            saved.append(rank.deferral.step)
        posted = [step for step, _, _ in rank.log]
        assert posted == saved[: len(posted)]
        if consumed is not None:
            assert consumed.state is State.CONSUMED
            assert consumed.payload == rank.deferral.step - policy[0]
            assert consumed.payload in posted
        if dice == 0:
            rank.deferral.flush("test")
            assert [step for step, _, _ in rank.log] == saved
    assert rank.deferral.tally.posts["fallback"] == 0
    delay, placement = policy[1:]
    assert max(rank.deferral.tally.ages, default=0) <= (delay if placement == PRE_MODEL else delay + 1)
    rank.deferral.flush("end")
    assert [step for step, _, _ in rank.log] == saved


@pytest.mark.parametrize(("depth", "delay", "placement"), POLICIES)
def test_a_hole_stays_a_hole(depth, delay, placement):
    """A step that receives nothing shifts nothing: its neighbours are posted and consumed at their own steps."""
    rank = Rank(depth, delay, placement)
    for step in range(1, 30):
        consumed = rank.step(receives=step != 10)
        assert (consumed is None) == (step <= depth or step == 10 + depth)
    assert 10 not in [step for step, _, _ in rank.log]
    assert {at - step for step, at, _ in rank.log[1:]} == {delay}


def test_an_empty_step_is_caught_up_with_before_the_next_model():
    """After the model of a step that ran none there is no point to post at; the next step's start is the nearest."""
    rank = Rank(4, 2, POST_MODEL)
    for _ in range(3):
        rank.step()
    assert rank.log[-1] == (1, 1, "model")
    rank.step(runs=False)  # where step 2 was due
    assert rank.log[-1] == (1, 1, "model")
    rank.step()
    assert rank.log[-2:] == [(2, 5, "start"), (3, 5, "model")]
    assert rank.deferral.tally.posts["catch_up"] == 1


def test_pre_model_d_posts_where_post_model_d_minus_1_does():
    """Nothing happens between one step's model and the next step's start: why PP2 gains nothing before the model."""
    before, after = Rank(4, 3, PRE_MODEL), Rank(4, 2, POST_MODEL)
    for _ in range(20):
        before.step()
        after.step()
    assert [(step, at - 1) for step, at, _ in before.log[1:]] == [log[:2] for log in after.log[1 : len(before.log)]]


@pytest.mark.parametrize("depth", range(2, 17))
def test_the_rank_aware_delay_is_always_a_delay(depth):
    """Every rank that receives gets a delay the policy takes, and the last of them the shortest."""
    delays = [delay_for(rank, depth) for rank in range(depth - 1)]
    assert delays == sorted(delays, reverse=True)
    assert (delays[0], delays[-1]) == (depth - 1, 1)


@pytest.mark.parametrize(
    ("depth", "delay", "placement"),
    [(4, 0, PRE_MODEL), (4, 4, PRE_MODEL), (4, -1, POST_MODEL), (1, 1, PRE_MODEL), (4, 1, "")],
)
def test_a_delay_or_placement_out_of_range_is_refused(depth, delay, placement):
    """The rule itself takes nothing that could be consumed before it is posted."""
    with pytest.raises(ValueError, match="delay="):
        Deferral(depth, delay, placement, print)


def test_a_second_receive_in_a_step_posts_the_first():
    """The handler forgets the first, but its peers are in it already: it must go out, in its turn."""
    rank = Rank(4, 3, POST_MODEL)
    rank.step()
    rank.step()
    rank.deferral.save("again")
    assert [step for step, _, _ in rank.log] == [1, 2]
    rank.deferral.flush("test")
    assert [step for step, _, _ in rank.log] == [1, 2, "again"]


def test_a_post_that_fails_is_not_repeated():
    """A collective that raised may be half on its way; the next flush goes on behind it."""
    posted = []

    def post(payload):
        if payload == "bad":
            raise OSError("peer is gone")
        posted.append(payload)

    deferral = Deferral(4, 3, POST_MODEL, post)
    for payload in ("first", "bad", "good"):
        deferral.begin_step()
        deferral.save(payload)
    with pytest.raises(OSError, match="peer is gone"):
        deferral.flush("test")
    assert deferral.flush("again") == 1
    assert posted == ["first", "good"]


def test_a_tally_outlives_its_deferral():
    """What was counted before a warm-up is still there after it."""
    tally = Tally()
    for _ in range(2):
        deferral = Deferral(3, 1, POST_MODEL, lambda payload: None, tally)
        deferral.begin_step()
        deferral.save("x")
    assert tally.posts == {"prime": 2}


@pytest.mark.parametrize("seed", range(3))
def test_eight_ranks_keep_one_ledger(seed):
    """2,000 random steps on 8 stages: every rank posts, in order, exactly what the last rank broadcasts."""
    dice = random.Random(seed)
    ranks = [Rank(8, delay_for(number, 8), POST_MODEL) for number in range(7)]
    broadcast = []
    for step in range(1, 2001):
        runs, receives = dice.random() < 0.9, dice.random() < 0.8
        if runs and receives:
            broadcast.append(step)
        for rank in ranks:
            rank.step(receives, runs)
            if dice.random() < 0.01:
                rank.deferral.flush("dice")
    for rank in ranks:
        rank.deferral.flush("end")
        assert [step for step, _, _ in rank.log] == broadcast
        assert rank.deferral.tally.posts["fallback"] == 0
