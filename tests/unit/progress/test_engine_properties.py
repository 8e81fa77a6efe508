"""Properties of the engine under random interleavings, against a model of what must be true of every send."""

import logging
from functools import partial

import fakes
import pytest
from fakes import NEVER, FakeClock, FakeDriver, FakeMultiHandleWrapper, FakeRequest, FakeWork, SendFailedError
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.progress.relay import RelayThread
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.settings.core import Settings

SLOTS = 4
BUDGET = 3
DEADLINE_S = 1.0
TABLES = ("send_handles", "send_schedule_handles")

names = st.sampled_from(TABLES)
slots = st.integers(0, SLOTS - 1)
afters = st.one_of(st.integers(0, 2 * BUDGET + 1), st.just(NEVER))


class Sends(RuleBasedStateMachine):
    """Posts, drives, waits, completions, failures and overwrites, in any order, on one thread."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        config = Settings(max_polls=BUDGET, drain_deadline_s=DEADLINE_S, backoff_max_us=1e5)
        self.engine = Engine(config, driver=FakeDriver(), clock=self.clock, pause=self.clock.pause)
        self.kept = []  # by the keeper, which is not at work here
        KEEPER.keep = self.kept.append
        self.tables = {name: self.engine.table(name, [None] * SLOTS) for name in TABLES}
        self.model = {(name, slot): None for name in TABLES for slot in range(SLOTS)}  # what must be in each slot
        self.posted, self.dropped = [], []
        self.raised = self.waited = 0

    # What happens

    @rule(by_relay=st.booleans())
    def another_thread_comes(self, by_relay):
        """Change who posts and tests: the relay's thread, which drives what it posts, or another one."""
        self.engine.relay = RelayThread()
        if by_relay:
            self.engine.relay.comes_by()

    @rule(name=names, slot=slots, after=afters, shape=st.sampled_from([FakeRequest, FakeWork]))
    def post(self, name, slot, after, shape):
        """Write a send to a slot, as upstream does after its wait, or by mistake over a pending one."""
        handle = shape(after)
        self.posted.append(handle)
        self.model[name, slot] = handle
        self.tables[name][slot] = handle

    @rule(name=names, slot=slots)
    def receiver_arrives(self, name, slot):
        """Let a pending send complete at its next test."""
        if (handle := self.model[name, slot]) is not None:
            handle.complete()

    @rule(name=names, slot=slots)
    def connection_breaks(self, name, slot):
        """Let a pending send raise from now on."""
        if (handle := self.model[name, slot]) is not None and not handle.seen:
            handle.fail(SendFailedError(f"{name}[{slot}]"))

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        """Let time pass outside the engine."""
        self.clock.now += seconds

    # What is asked of the engine

    @rule()
    def drive(self):
        """Drive everything: at most one budget a table, and true exactly when nothing is pending."""
        before = self._tests()
        clear = self.engine.drive()
        assert self._tests() - before <= BUDGET * len(TABLES)
        assert clear == (not self._pending())

    @rule(name=names, slot=slots, budget=st.one_of(st.none(), st.integers(1, 8)))
    def progress(self, name, slot, budget):
        """Drive one slot: at most the budget, nobody else's, and true exactly when it is clear."""
        before, mine = self._tests(), self._tests_of(name, slot)
        clear = self.engine.progress_pp_send_handles(self.tables[name], slot, budget)
        spent = self._tests() - before
        assert spent == self._tests_of(name, slot) - mine if self.model[name, slot] is not None else spent == 0
        assert spent <= (budget or BUDGET)
        assert clear == (self.tables[name][slot] is None)

    @rule(name=names, slot=slots)
    def wait(self, name, slot):
        """Wait as cleanup does where the receiver may never come, and as steady state does otherwise."""
        handle, table = self.model[name, slot], self.tables[name]
        closing = self.engine.deadline is not None
        if handle is not None and handle.after == NEVER and handle.error is None and not closing:
            self.clock.on_pause = handle.complete  # the receiver comes during the first pause

        def upstream_wait():
            self.waited += 1
            assert handle.error is not None
            handle.wait()

        start = self.clock()
        try:
            wait_for_slot(self.engine, table, slot, upstream_wait)
        except SendFailedError:
            assert not closing
            self.raised += 1
            assert table[slot] is handle
            return
        finally:
            self.clock.on_pause = lambda: None
        assert table[slot] is None
        assert not closing or self.clock() <= max(start, self.engine.deadline) + 0.1 + 1e-6
        if handle is not None and handle.error is not None and not handle.seen:
            self.dropped.append(handle)

    @rule()
    def close(self):
        """Begin the end: from now on every wait has one."""
        self.engine.close()

    @rule()
    def let_go(self):
        """End the relay: at once, with nothing pending afterwards, and without a test."""
        before, start = self._tests(), self.clock()
        self.engine.let_go()
        assert (self._tests(), self.clock()) == (before, start)
        assert not self.engine.pending()

    @rule()
    def reopen(self):
        """Begin a new life, as a second executor does, with the same tables."""
        self.engine.reopen()

    # What must be true at any time

    @invariant()
    def a_slot_is_clear_exactly_when_its_send_was_seen_complete_or_given_up(self):
        """Each slot holds the last send posted to it, until somebody saw it complete, dropped or abandoned it."""
        gone = {id(record.handle) for record in self.kept if record.completion is not None}
        gone |= {id(handle) for handle in self.dropped}
        for (name, slot), handle in self.model.items():
            cleared = handle is None or handle.seen or id(handle) in gone
            assert (self.tables[name][slot] is None) == cleared
            assert cleared or self.tables[name][slot] is handle

    @invariant()
    def nothing_is_lost(self):
        """Every send was seen complete, or is broken, or somebody still holds it: its slot, or the keeper."""
        held = self._kept()
        held |= {id(handle) for table in self.tables.values() for handle in table if handle is not None}
        held |= {id(handle) for table in self.tables.values() for _, handle, _ in table.sends.fresh}
        for handle in self.posted:
            assert handle.seen or handle.error is not None or id(handle) in held

    @invariant()
    def what_is_kept_can_be_driven(self):
        """The keeper has what tests a send, unless it is broken; and it gets each once."""
        assert all(record.completion is not None or record.handle.raised for record in self.kept)
        driven = [id(record.handle) for record in self.kept if record.completion is not None]
        assert len(set(driven)) == len(driven)

    @invariant()
    def pending_is_what_can_still_be_driven(self):
        """Pending means that some send is neither complete, nor known to be broken, nor given up."""
        assert self.engine.pending() == self._pending()

    @invariant()
    def nobody_blocked_cancelled_or_asked_again(self):
        """No handle saw a wait that nothing ends, a cancel, or a test after it was complete."""
        assert fakes.FAULTS == []

    @invariant()
    def counters_add_up(self):
        """Completions are the sends seen complete, and no counter counts a send twice."""
        counters = [table.sends.counters for table in self.tables.values()]
        assert sum(c.completions for c in counters) == sum(handle.seen for handle in self.posted)
        assert sum(c.abandoned for c in counters) == len(self.engine.abandoned)
        assert sum(c.displaced + c.abandoned for c in counters) <= len(self.kept)
        fresh = sum(len(table.sends.fresh) for table in self.tables.values())
        assert sum(c.posts for c in counters) + fresh == len(self.posted)

    def _tests(self):
        return sum(handle.tests for handle in self.posted)

    def _tests_of(self, name, slot):
        handle = self.model[name, slot]
        return 0 if handle is None else handle.tests

    def _wait_as_upstream(self, name, slot):
        self.tables[name][slot].wait()

    def _kept(self):
        return {id(record.handle) for record in self.kept}

    def _pending(self):
        kept = self._kept()
        return any(not handle.seen and not handle.raised and id(handle) not in kept for handle in self.posted)

    def teardown(self):
        """End as cleanup does, within one deadline, with every table empty."""
        try:
            self.reopen()
            self.engine.close()
            deadline = self.engine.deadline
            for name, slot in self.model:
                wait_for_slot(self.engine, self.tables[name], slot, partial(self._wait_as_upstream, name, slot))
            assert self.clock() <= deadline + 0.1 + 1e-6
            assert not self.engine.pending()
            assert all(table == [None] * SLOTS for table in self.tables.values())
            assert fakes.FAULTS == []
        finally:
            del KEEPER.keep


@pytest.fixture(autouse=True)
def _quiet(caplog):
    """Keep thousands of expected messages out of a failure's report."""
    caplog.set_level(logging.CRITICAL, logger="trtllm_pp_progress")


TestSends = Sends.TestCase
TestSends.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_mixed_crowd_is_complete_in_the_order_it_completes():
    """Control: every shape in one table, driven to the end, but for what only upstream can wait for."""
    engine = Engine(Settings(max_polls=BUDGET), clock=(clock := FakeClock()), pause=clock.pause)
    table = engine.table("send_handles", [None] * SLOTS)
    for slot, handle in enumerate(
        [FakeRequest(7), [FakeWork(2), FakeRequest(9)], FakeWork(4), FakeMultiHandleWrapper([])]
    ):
        table[slot] = handle
    for slot in range(3):
        wait_for_slot(engine, table, slot, lambda: pytest.fail("upstream's wait"))
    assert [handle is None for handle in table] == [True, True, True, False]
