"""The wait before a forward: it has an end, gives nothing up, and costs a pipeline that cannot drain little."""

import logging
import math

import pytest
from fakes import NEVER, FakeMultiHandleWrapper, FakeRequest, FakeWork

from trtllm_pp_progress._drains import Drains
from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._settings import Settings


class Rig:
    """One engine, one table, the drains of one executor, and upstream's wait."""

    def __init__(self, clock, patience=10.0):
        self.clock = clock
        self.engine = Engine(Settings(max_polls=10, backoff_max_us=50_000), clock=clock, pause=clock.pause)
        self.table = self.engine.table("send_handles", [None] * 4)
        self.drains = Drains(self.engine, patience, clock, clock.pause)
        self.upstream_waits = 0

    def wait(self, slot=0):
        """Wait as a drain before a forward does, and return the seconds it took."""
        started = self.clock()
        self.drains.wait(self.table, slot, self.upstream_wait)
        return self.clock() - started

    def upstream_wait(self):
        """Wait as upstream does."""
        self.upstream_waits += 1
        self.table[0].wait()
        self.table[0] = None


@pytest.fixture
def rig(clock):
    """Return a rig with ten seconds of patience."""
    return Rig(clock)


def test_a_wait_is_over_as_soon_as_the_send_is_complete(rig):
    """The slot is clear afterwards, as after upstream's wait, and nothing blocked."""
    rig.table[0] = handle = FakeRequest(100)
    assert 0 < rig.wait() < 1
    assert (rig.table[0], handle.waits, rig.upstream_waits) == (None, 0, 0)


def test_a_clear_slot_costs_nothing(rig):
    """No pause and no test."""
    assert rig.wait() == 0
    assert rig.clock.pauses == []


def test_a_wait_in_vain_gives_nothing_up(rig):
    """The send stays in its slot, pending, and is driven on: it is complete once it is received."""
    rig.table[0] = handle = FakeRequest(NEVER)
    assert rig.wait() == pytest.approx(10, abs=0.06)
    assert (rig.table[0], rig.engine.pending, rig.engine.abandoned) == (handle, True, [])
    handle.complete()
    assert rig.engine.drive()
    assert rig.table[0] is None


def test_a_pipeline_that_cannot_drain_costs_little_more_than_the_first_wait(rig, caplog):
    """A thousand waits in vain cost a ninth more than one, and one line in the log."""
    caplog.set_level(logging.WARNING, logger="trtllm_pp_progress")
    rig.table[0] = FakeRequest(NEVER)
    assert sum(rig.wait() for _ in range(1000)) < 10 / 0.9 + 0.5
    said = [record.getMessage() for record in caplog.records if "next forward" in record.getMessage()]
    assert said == ["send_handles[0] was not received in 10.0 s: going on to the next forward without it"]


def test_patience_comes_back(rig):
    """After two waits in vain, two that were not are as patient as before."""
    rig.table[0] = FakeRequest(NEVER)
    rig.wait()
    rig.wait()
    assert rig.drains.patience == pytest.approx(0.1)
    for expected in (1, 10, 10):
        rig.table[1] = FakeRequest(30)
        rig.wait(1)
        assert rig.drains.patience == pytest.approx(expected)


def test_patience_comes_back_after_any_number_of_waits_in_vain(rig):
    """A pipeline that could not drain for an hour is as patient as before a few good waits later."""
    rig.table[0] = FakeRequest(NEVER)
    for _ in range(1000):
        rig.wait()
    for _ in range(5):
        rig.table[1] = FakeRequest(15)  # a second drive, after the shortest pause
        rig.wait(1)
    assert rig.drains.patience == 10


def test_no_patience_at_all_is_said_once(clock, caplog):
    """TRTLLM_PP_PROGRESS_DRAIN_DEADLINE_S=0: a drain is one drive, and no line in the log each time."""
    caplog.set_level(logging.WARNING, logger="trtllm_pp_progress")
    rig = Rig(clock, 0.0)
    rig.table[0] = FakeRequest(NEVER)
    assert sum(rig.wait() for _ in range(100)) == 0
    assert len([record for record in caplog.records if "next forward" in record.getMessage()]) == 1


def test_a_send_that_is_complete_at_once_says_nothing_about_patience(rig):
    """A pipeline that cannot drain has such ones too."""
    rig.table[0] = FakeRequest(NEVER)
    rig.wait()
    rig.engine.tests_at_post = lambda: 0
    rig.table[1] = FakeRequest(1)
    rig.wait(1)
    assert rig.drains.patience == pytest.approx(1)


def test_where_nobody_else_drives_patience_has_no_end(clock):
    """Going on would park the send: upstream's rule is kept."""
    rig = Rig(clock, math.inf)
    rig.table[0] = FakeRequest(5000)
    assert rig.wait() > 5
    assert rig.table[0] is None


@pytest.mark.parametrize("retired", [True, False])
def test_what_is_not_ours_to_test_gets_upstreams_wait(rig, retired):
    """A handle without test(), or any once the engine has retired."""
    rig.table[0] = FakeRequest(0, payload="x") if retired else FakeMultiHandleWrapper([FakeWork(0)])
    if retired:
        rig.table.sends.fresh.clear()
        rig.table[0] = FakeRequest(3)
        rig.engine.retire()
    rig.wait()
    assert (rig.table[0], rig.upstream_waits) == (None, 1)
