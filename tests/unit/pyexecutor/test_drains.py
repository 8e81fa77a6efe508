"""The wait before a forward: it has an end, gives nothing up, and costs a pipeline that cannot drain little."""

import logging
import math

import pytest
from fakes import NEVER, FakeDriver, FakeMultiHandleWrapper, FakeRequest, FakeWork

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.pyexecutor.drains import Drains
from trtllm_pp_progress.settings.core import Settings


class Rig:
    """One engine, one table, the drains of one executor, and upstream's wait."""

    def __init__(self, clock, patience=10.0):
        self.clock = clock
        settings, log = Settings(max_polls=10, backoff_max_us=50_000), Log(lambda: (2, 3))
        self.engine = Engine(settings, log, FakeDriver(), clock, clock.pause)
        self.table = self.engine.table("send_handles", [None] * 4)
        self.drains = Drains(self.engine, patience)
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
    assert (rig.table[0], rig.engine.pending(), rig.engine.abandoned) == (handle, True, [])
    handle.complete()
    assert rig.engine.drive()
    assert rig.table[0] is None


def test_a_pipeline_that_cannot_drain_costs_little_more_than_the_first_wait(rig, caplog):
    """A thousand waits in vain cost a ninth more than one, and one line in the log."""
    caplog.set_level(logging.WARNING, logger="trtllm_pp_progress")
    rig.table[0] = FakeRequest(NEVER)
    assert sum(rig.wait() for _ in range(1000)) < 10 / 0.9 + 0.5
    said = [record.getMessage() for record in caplog.records if "next forward" in record.getMessage()]
    assert said == [
        "rank 2: the send in send_handles[0] to rank 3 was not received in 10.0 s: the next forward goes without it"
    ]


def test_patience_comes_back_with_time(rig):
    """By a hundredth of it: what was waited in vain is there again after a hundred times as long, and no more."""
    rig.table[0] = FakeRequest(NEVER)
    rig.wait()
    assert rig.drains.patience == pytest.approx(0.0)
    for passes, expected in ((100, 1), (400, 5), (500, 10), (100_000, 10)):
        rig.clock.now += passes
        assert rig.drains.patience == pytest.approx(expected)


def test_what_has_come_back_is_waited_for_and_spent(rig):
    """One budget for all slots."""
    rig.table[0], rig.table[1] = FakeRequest(NEVER), FakeRequest(NEVER)
    rig.wait()
    rig.clock.now += 300
    assert rig.wait(1) == pytest.approx(3, abs=0.06)
    assert rig.wait(0) == 0
    assert rig.drains.patience == 0


def test_a_pipeline_that_goes_on_loses_a_hundredth_to_drains_in_vain(rig):
    """Ten minutes of steps of 500 ms, each of which drains in vain; a pause may end late."""
    rig.table[0] = FakeRequest(NEVER)
    started, lost = rig.clock(), 0.0
    for _ in range(1200):
        lost += rig.wait()
        rig.clock.now += 0.5
    assert lost < 10 + 0.02 * (rig.clock() - started)


def test_a_wait_that_was_not_in_vain_spends_nothing(rig):
    """However long it took."""
    rig.table[1] = handle = FakeRequest(NEVER)
    rig.clock.on_pause = lambda: handle.complete() if rig.clock() > 1009 else None
    assert 9 < rig.wait(1) < 10
    assert rig.drains.patience == 10


def test_no_patience_at_all_is_not_said_each_time(clock, caplog):
    """TRTLLM_PP_PROGRESS_DRAIN_DEADLINE_S=0: a drain is one drive; a line the first time and every tenfold."""
    caplog.set_level(logging.WARNING, logger="trtllm_pp_progress")
    rig = Rig(clock, 0.0)
    rig.table[0] = handle = FakeRequest(NEVER)
    assert sum(rig.wait() for _ in range(500)) == 0
    assert handle.tests >= 500
    assert len([record for record in caplog.records if "next forward" in record.getMessage()]) == 3


def test_a_send_that_is_complete_at_once_says_nothing_about_patience(rig):
    """A pipeline that cannot drain has such ones too."""
    rig.table[0] = FakeRequest(NEVER)
    rig.wait()
    rig.clock.now += 100
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
