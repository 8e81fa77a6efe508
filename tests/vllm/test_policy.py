"""The rule alone: what is posted when, in which order, for any sequence of steps."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pp_progress.vllm.policy import Deferral, Lost, Saved, Tally, delay_for

POLICIES = [(depth, delay) for depth in range(2, 9) for delay in range(1, depth)]


class Rank:
    """A handler's queue that is led through steps under a deferral, with a log of what is posted."""

    def __init__(self, depth, delay):
        self.log = []
        self.queue = deque([None] * depth)
        self.deferral = Deferral(self.queue, delay)
        self.now = 0
        self.point = "start"

    def post(self, saved):
        if saved is not None:
            self.log.append((saved.payload, self.now, self.point))
            saved.slot.event = "posted"

    def flush(self, reason="test"):
        for saved in self.deferral.flush(reason):
            self.post(saved)

    def step(self, receives=True, runs=True):
        """Run one step; return the step whose receive it consumes."""
        self.now += 1
        self.point = "start"
        self.post(self.deferral.begin_step())
        slot = self.queue.popleft()
        self.queue.append(None)
        assert slot is None or slot.event == "posted"
        if runs:
            self.point = "model"
            self.post(self.deferral.after_model())
            if receives:
                self.queue[-1] = mine = SimpleNamespace(step=self.now)
                mine.event = Saved(mine, self.now, self.post)
        return slot and slot.step


@pytest.mark.parametrize(("depth", "delay"), POLICIES)
def test_a_busy_pipe_posts_every_receive_at_its_delay(depth, delay):
    """Each receive goes out exactly `delay` steps after it was saved, after the model; none is forced."""
    rank = Rank(depth, delay)
    consumed = [rank.step() for _ in range(40)]
    expected = [(step, step + delay, "model") for step in range(1, 41 - delay)]
    assert rank.log == expected
    assert consumed == [None] * depth + list(range(1, 41 - depth))
    assert rank.deferral.tally.posts() == {"due": len(expected)}
    assert rank.deferral.tally.ages() == {delay: len(expected)}


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
            saved.append(rank.now)
        posted = [step for step, _, _ in rank.log]
        assert posted == saved[: len(posted)]
        if consumed is not None:
            assert consumed == rank.now - policy[0]
            assert consumed in posted
        if dice == 0:
            rank.flush("test")
            assert [step for step, _, _ in rank.log] == saved
    assert max(rank.deferral.tally.ages(), default=0) <= policy[1] + 1
    rank.flush("end")
    assert [step for step, _, _ in rank.log] == saved


@pytest.mark.parametrize(("depth", "delay"), POLICIES)
def test_a_hole_stays_a_hole(depth, delay):
    """A step that receives nothing shifts nothing: its neighbours are posted and consumed at their own steps."""
    rank = Rank(depth, delay)
    for step in range(1, 30):
        consumed = rank.step(receives=step != 10)
        assert (consumed is None) == (step <= depth or step == 10 + depth)
    assert 10 not in [step for step, _, _ in rank.log]
    assert {at - step for step, at, _ in rank.log} == {delay}


def test_an_empty_step_is_caught_up_with_before_the_next_model():
    """After the model of a step that ran none there is no point to post at; the next step's start is the nearest."""
    rank = Rank(4, 2)
    for _ in range(3):
        rank.step()
    assert rank.log == [(1, 3, "model")]
    rank.step(runs=False)  # where step 2 was due
    assert rank.log == [(1, 3, "model")]
    rank.step()
    assert rank.log[1:] == [(2, 5, "start"), (3, 5, "model")]
    assert rank.deferral.tally.posts()["catch_up"] == 1


@pytest.mark.parametrize("depth", range(2, 17))
def test_the_rank_aware_delay_is_always_a_delay(depth):
    """Every rank that receives gets a delay the policy takes, and the last of them the shortest."""
    delays = [delay_for(rank, depth) for rank in range(depth - 1)]
    assert delays == sorted(delays, reverse=True)
    assert (delays[0], delays[-1]) == (depth - 1, 1)


@pytest.mark.parametrize(("depth", "delay"), [(4, 0), (4, 4), (4, -1), (1, 1)])
def test_a_delay_out_of_range_is_refused(depth, delay):
    """The rule itself takes nothing that could be consumed before it is posted."""
    with pytest.raises(ValueError, match="delay="):
        Deferral(deque([None] * depth), delay)


def test_an_unposted_receive_cannot_be_used():
    """Neither one that flushing does not reach nor one whose posting failed passes for an event."""
    slot = SimpleNamespace()
    slot.event = Saved(slot, "calls", lambda saved: None)
    for event in (slot.event, Lost()):
        with pytest.raises(RuntimeError, match="could not be posted"):
            event.wait("stream")


def test_a_lost_receive_is_not_repeated():
    """What failed is passed over: it is neither due nor flushed again, and what is younger goes on."""
    rank = Rank(4, 3)
    rank.step()
    rank.step()
    rank.queue[-2].event = Lost()
    rank.flush()
    assert [step for step, _, _ in rank.log] == [2]


def test_a_tally_outlives_its_deferral():
    """What was counted before a warm-up is still there after it."""
    tally = Tally(3)
    for _ in range(2):
        rank = Rank(3, 1)
        rank.deferral = Deferral(rank.queue, 1, tally)
        rank.step()
        rank.flush()
    assert tally.posts() == {"test": 2}


@pytest.mark.parametrize("seed", range(3))
def test_eight_ranks_keep_one_ledger(seed):
    """2,000 random steps on 8 stages: every rank posts, in order, exactly what the last rank broadcasts."""
    dice = random.Random(seed)
    ranks = [Rank(8, delay_for(number, 8)) for number in range(7)]
    broadcast = []
    for step in range(1, 2001):
        runs, receives = dice.random() < 0.9, dice.random() < 0.8
        if runs and receives:
            broadcast.append(step)
        for rank in ranks:
            rank.step(receives, runs)
            if dice.random() < 0.01:
                rank.flush("dice")
    for rank in ranks:
        rank.flush("end")
        assert [step for step, _, _ in rank.log] == broadcast
