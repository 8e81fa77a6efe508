"""The handle table: still upstream's list, and aware of what is written to it."""

import fakes
import pytest
from fakes import NEVER, FakeDriver, FakePart, FakeParts, FakeRequest

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.sends import UNTESTED
from trtllm_pp_progress.progress.table import HandleTable, clear_slot
from trtllm_pp_progress.settings.core import Settings


@pytest.fixture
def engine(clock):
    """Return an engine on the fake clock."""
    return Engine(Settings(), driver=FakeDriver(), clock=clock, pause=clock.pause)


def recorded(size):
    """Return a table of empty slots and the list of what it reports."""
    posts = []
    table = HandleTable("send_handles", [None] * size, lambda table, slot, handle, error: posts.append((slot, handle)))
    return table, posts


def test_it_stays_a_list():
    """Length, order, indexing, loops, containment and equality mean what they meant."""
    table, _ = recorded(3)
    table[1] = "handle"
    assert isinstance(table, list)
    assert table == [None, "handle", None]
    assert (len(table), table[1], table[-2], table[0:2]) == (3, "handle", "handle", [None, "handle"])
    assert "handle" in table
    assert [handle is None for handle in table] == [True, False, True]


def test_a_write_is_reported_with_slot_and_handle():
    """Every handle that is written is reported once; None is not."""
    table, posts = recorded(3)
    table[2], table[0], table[2] = "a", None, "b"
    assert posts == [(2, "a"), (2, "b")]


def test_a_negative_index_is_reported_as_the_slot_it_means():
    """table[-1] is the last slot."""
    table, posts = recorded(3)
    table[-1] = "a"
    assert posts == [(2, "a")]


def test_what_it_is_made_of_is_reported():
    """Handles that are there at the start are pending too."""
    posts = []
    HandleTable("send_handles", [None, "a", None, "b"], lambda table, slot, handle, error: posts.append((slot, handle)))
    assert posts == [(1, "a"), (3, "b")]


def test_a_slice_is_written_slot_by_slot():
    """Assigning a slice of the same length reports what it writes."""
    table, posts = recorded(4)
    table[1:3] = ["a", None]
    table[::2] = [None, "b"]
    assert table == [None, "a", "b", None]
    assert posts == [(1, "a"), (2, "b")]


def test_a_request_that_is_complete_as_it_is_written_leaves_an_empty_slot(engine, kept):
    """It is counted, nobody is told of it, and what the slot held before is kept alive."""
    table = engine.table("send_handles", [None] * 2)
    engine.relay.wake = lambda: pytest.fail("nothing is pending")
    table[0] = FakeParts([FakePart(1), FakePart(1)])
    counted = table.sends.describe(0.0)
    assert (list(table), engine.pending(), engine.driver.told) == ([None, None], False, [])
    assert (counted["posts"], counted["polls"], counted["completions"], counted["pending"]) == (1, 1, 1, [])
    engine.relay.wake = lambda: None
    table[-1] = old = FakeParts([FakePart(NEVER)])
    engine.drive()
    table[-1] = FakeParts([FakePart(1)])
    assert (table[-1], table.sends.counters.displaced, [record.handle for record in kept]) == (None, 1, [old])


def test_after_a_test_in_vain_the_next_writes_have_none_where_a_native_driver_tests():
    """Sends of a table are alike: a test in the middle of a step that answers no is time lost."""
    table, posts = recorded(1)
    table.sends.native = lambda *_: pytest.fail("the table itself asks for nothing")
    first = FakeParts([FakePart(NEVER)])
    later = [FakeParts([FakePart(1)]) for _ in range(UNTESTED + 1)]
    for parts in [first, *later]:
        table[0] = parts
    assert [parts[0].tests for parts in [first, *later]] == [1, *[0] * UNTESTED, 1]
    assert (len(posts), table.sends.at_once, table[0]) == (1 + UNTESTED, 1, None)


def test_a_request_that_is_not_complete_is_reported_after_one_test_of_its_open_parts():
    """The rest is the engine's."""
    table, posts = recorded(2)
    parts = FakeParts([FakePart(1), FakePart(NEVER), FakePart(1)])
    table[1] = parts
    assert posts == [(1, parts)]
    assert [part.tests for part in parts] == [1, 1, 0]


def test_what_that_test_raises_is_upstreams_to_meet(engine):
    """The write succeeds, as upstream expects, and the handle is not tested again."""
    table = engine.table("send_handles", [None])
    handle = FakeParts([FakePart(error=ConnectionError("gone"))])
    table[0] = handle
    engine.drive()
    assert (table[0], handle[0].tests, table.sends.counters.failed, engine.pending()) == (handle, 1, 1, False)


@pytest.mark.parametrize("ended", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_thread_that_is_ended_in_that_test_leaves_a_send_that_drives_know(engine, ended):
    """The buffers are in use, whatever ends the thread: it is in its slot, pending, and driven by others."""
    table = engine.table("send_handles", [None])
    handle = FakeParts([FakePart(3, error=ended(), errors=1)])
    with pytest.raises(ended):
        table[0] = handle
    assert (table[0], engine.pending()) == (handle, True)
    assert engine.drive() is True
    assert (handle[0].seen, table[0]) == (True, None)


GROWING = {
    "append": lambda table, handle: table.append(handle),
    "extend": lambda table, handle: table.extend([None, handle]),
    "+=": lambda table, handle: table.__iadd__((None, handle)),
}


@pytest.mark.parametrize("grow", GROWING.values(), ids=GROWING)
def test_a_slot_that_is_added_holds_a_send_that_drives_know(engine, grow):
    """However upstream's list grows: what comes with it is pending, by the slot it is in."""
    table = engine.table("send_handles", [None] * 2)
    grow(table, handle := FakeRequest(3))
    assert type(table) is HandleTable
    assert [entry["slot"] for entry in table.sends.describe(0.0)["pending"]] == [len(table) - 1]
    assert engine.pending()
    assert engine.drive() is True
    assert (handle.seen, table) == (True, [None] * len(table))


def test_slots_that_are_added_empty_are_no_posts(engine):
    """And a table that was grown is the same table."""
    table = same = engine.table("send_handles", [None])
    table.append(None)
    table.extend([None])
    table += [None]
    assert (table is same, len(table), engine.pending(), table.sends.describe(0.0)["posts"]) == (True, 4, False, 0)


@pytest.mark.parametrize("values", [[], ["a"], ["a", "b", "c"]])
def test_a_slice_of_another_length_changes_nothing(values):
    """A table cannot grow or shrink through a slice, and a refused write leaves every slot as it was."""
    table, posts = recorded(4)
    with pytest.raises(ValueError, match="keeps its length"):
        table[1:3] = values
    assert table == [None] * 4
    assert posts == []


@pytest.mark.parametrize("slot", [3, -4, 1 << 40])
def test_an_index_out_of_range_is_an_index_error(slot):
    """A write beyond the table reports nothing."""
    table, posts = recorded(3)
    with pytest.raises(IndexError):
        table[slot] = "a"
    assert posts == []


def test_clearing_a_slot_reports_nothing():
    """clear_slot empties a slot past all bookkeeping, of a plain list as well."""
    table, posts = recorded(2)
    table[0] = "a"
    clear_slot(table, 0)
    plain = ["a"]
    clear_slot(plain, 0)
    assert (table, plain, len(posts)) == ([None, None], [None], 1)


def test_an_empty_table_has_nothing_pending(engine):
    """1,024 empty slots are no work, and say so without being looked at."""
    table = engine.table("send_handles", [None] * 1024)
    assert not table.sends
    assert not engine.pending()


@pytest.mark.parametrize("driven", [True, False], ids=["driven", "fresh"])
def test_an_overwritten_pending_send_is_kept_and_counted(engine, driven, kept):
    """Whoever writes over a pending send, driven before or not, it goes to the keeper; the new one is tracked."""
    table = engine.table("send_handles", [None])
    old, new = FakeRequest(NEVER), FakeRequest(NEVER)
    table[0] = old
    if driven:
        engine.drive()
    table[0] = new
    engine.drive()
    assert [(record.handle, record.lock) for record in kept] == [(old, table.sends.lock)]
    assert table.sends.counters.displaced == 1
    assert table[0] is new
    new.complete()
    assert engine.drive()
    assert table == [None]


def test_none_over_a_pending_slot_means_that_upstream_has_waited(engine, kept):
    """Upstream writes None only after its own wait: the slot is then nobody's, and nothing was displaced."""
    table = engine.table("send_handles", [None])
    table[0] = FakeRequest(NEVER)
    engine.drive()
    table[0] = None
    assert engine.drive()
    assert (table.sends.counters.displaced, kept) == (0, [])


def test_describe_counts_and_lists_what_is_pending(engine, clock):
    """A table's description has every counter, and slot and age of what is pending."""
    table = engine.table("send_handles", [None] * 4)
    table[2] = FakeRequest(NEVER)
    engine.drive()
    clock.now += 3
    described = table.sends.describe(clock())
    assert described["pending"] == [{"slot": 2, "age_s": 3.0}]
    assert (described["posts"], described["polls"], described["completions"]) == (1, Settings().max_polls, 0)
    assert fakes.FAULTS == []
