"""Never worse than unpatched: twins live through one situation each, and the patched one loses nothing by the patch.

All situations, and the table of what came of each twin: `python tests/support/twin.py --all`.
"""

import itertools

import pytest
from twins.cells import COLUMNS, DEFAULT, PENDING, SUITE, Cell, cover
from twins.job import Outcome, Rank
from twins.table import judge, report
from twins.verdict import LATER_S, NOISE_S, worse

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("cell", SUITE, ids=str)
def test_nobody_is_worse_off_with_the_patch(cell):
    """Deliveries, exit codes and durations; where upstream is known to hang the twin without the patch does."""
    unpatched, patched, found = judge(cell)
    print(table := report(0, cell, unpatched, patched, found))
    assert found == [], table
    if cell.hangs_unpatched:
        assert unpatched[0].hung, table
        assert not patched[0].hung, table


def test_a_receiver_that_is_later_than_the_default_deadline_gets_its_message_at_once():
    """The wait for it has ended by then, the send has not: as long as the sender's process lives it is delivered."""
    cell = DEFAULT
    assert cell.late_s > cell.deadline_s == 10.0
    unpatched, patched, found = judge(cell)
    print(table := report(0, cell, unpatched, patched, found))
    assert found == [], table
    assert patched[0].delivered, table
    assert patched[0].ranks[0].latency_s < LATER_S, table
    assert patched[0].abandoned == 1, table


# The judge


def rank(role="another rank", code=0, end_s=1.0, output="", **events):
    """Return what a rank may have left."""
    at = {"ends": 100.0, "closed": 100.5, "ended": 100.0 + end_s, **events}
    return Rank(role, {name: {"at": when, "code": code} for name, when in at.items() if when is not None}, output)


def outcome(latency_s=0.1, right=True, tokens=(0, 1), others=None):
    """Return what a twin may have left: a receiver, and one other rank."""
    received = None if latency_s is None else 102.0 + latency_s
    first = rank("the receiver", 0, 3.0, receives=102.0, received=received)
    first.events["tokens"] = {"tokens": list(tokens)}
    if received is not None:
        first.events["received"]["right"] = right
    return Outcome([first, *(others or [rank()])], "")


GONE = Cell(receiver="gone", deadline_s=5.0)
WORSE = {
    "not delivered": outcome(latency_s=None),
    "delivered wrong": outcome(right=False),
    "delivered later": outcome(latency_s=0.7),
    "other tokens": outcome(tokens=(0, 2)),
    "another exit code": outcome(others=[rank(code=1)]),
    "killed by a signal": outcome(others=[rank(code=-11)]),
    "hangs": outcome(others=[rank(ended=None, cut=113.0)]),
    "the launcher ends it": outcome(others=[rank(ended=None)]),
    "aborted": outcome(others=[rank(output="MPI_Waitall was called after MPI_FINALIZE")]),
    "complains": outcome(others=[rank(output="Fatal Python error: deadlock")]),
    "ends later": outcome(others=[rank(end_s=1.1 + NOISE_S)]),
    "shuts down later": outcome(others=[rank(closed=100.6 + NOISE_S)]),
    "never shuts down": outcome(others=[rank(closed=None)]),
}


@pytest.mark.parametrize("what", WORSE)
def test_what_is_worse_is_seen(what):
    """Control: each way to be worse; the other way round it is better, which is no fault, or another exit code."""
    assert worse(Cell(), [outcome()], [WORSE[what]]) != []
    assert worse(Cell(), [WORSE[what]], [WORSE[what]]) == []


def test_what_is_alike_is_not_worse():
    """Control: neither is what is better."""
    assert worse(Cell(), [outcome()], [outcome()]) == []
    assert worse(Cell(), [outcome(0.6)], [outcome(0.1)]) == []
    assert worse(Cell(), [outcome(others=[rank(ended=None, cut=113.0)])], [outcome()]) == []


def test_where_a_peer_is_gone_the_deadline_may_be_waited_for():
    """And no longer; where the receiver is there it is not."""
    late = outcome(others=[rank(end_s=0.9 + NOISE_S + 5.0)])
    later = outcome(others=[rank(end_s=1.1 + NOISE_S + 5.0)])
    assert worse(GONE, [outcome()], [late]) == []
    assert worse(GONE, [outcome()], [later]) != []
    assert worse(Cell(deadline_s=5.0), [outcome()], [late]) != []


def test_upstreams_own_races_are_not_ours():
    """What an unpatched twin does now and then is no worse; what only some patched ones do is, but for their time."""
    crash, slow = WORSE["killed by a signal"], WORSE["ends later"]
    assert worse(Cell(), [outcome(), outcome()], [crash, outcome()]) != []
    assert worse(Cell(), [outcome(), crash], [crash, outcome()]) == []
    assert worse(Cell(), [outcome(), outcome()], [slow, outcome()]) == []
    assert worse(Cell(), [outcome(), outcome()], [slow, slow]) != []


def test_every_value_has_a_cell_and_every_pair_of_values_too():
    """In the suite, and in the whole table."""
    for name, values in COLUMNS.items():
        assert {getattr(cell, name) for cell in SUITE} == set(values), name
    cells = cover(2)
    for one, other in itertools.combinations(COLUMNS, 2):
        pairs = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        assert pairs == set(itertools.product(COLUMNS[one], COLUMNS[other]))
    assert len(cells) <= 110


def test_a_value_that_is_none_is_refused():
    """With the valid ones."""
    with pytest.raises(ValueError, match=f"pending='2 B' is not valid: one of {', '.join(PENDING)}"):
        Cell(pending="2 B")
