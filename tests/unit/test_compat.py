"""Compatibility: each shape of PyExecutor gets its verdict, an unknown one is left alone, and looking never raises."""

import functools
import json

import pytest
from fakes import ERAS, PATCHABLE, executor_class

from trtllm_pp_progress._compat import CLEANUP, RELAY, RING, WAIT, recognise


def grown(era="E", **attributes):
    """Return a fresh class of an era with some attributes set."""
    cls = executor_class(era)
    for name, value in attributes.items():
        setattr(cls, name, value)
    return cls


def without(name, era="E"):
    """Return a fresh class of an era that lacks a method."""
    cls = executor_class(era)
    delattr(cls, name)
    return cls


def init_that_names(name):
    """Return an __init__ that mentions an attribute."""
    namespace = {}
    exec(f"def __init__(self, dist=None):\n    self.{name} = self._broadcast_mpi_comm = None", namespace)
    return namespace["__init__"]


@pytest.mark.parametrize("era", ERAS)
def test_each_era_is_recognised_by_its_structure(era):
    """The fakes of the eras have no version: methods, parameters and names decide."""
    verdict = recognise(executor_class(era))
    assert (verdict.era, verdict.patch) == (era, era in PATCHABLE)
    assert verdict.action == ("patch" if verdict.patch else "stand down")
    assert verdict.reason


def test_the_relay_on_the_executor_thread_has_nothing_to_gain():
    """Era A waits within the iteration; the verdict says why it is left alone."""
    assert "nothing is parked" in recognise(executor_class("A")).reason


def test_a_blocking_flush_and_its_absence_are_told_apart():
    """C and B/D differ by one statement, found in the loop itself or in a function within it."""
    assert recognise(executor_class("C")).found["flush"]
    assert not recognise(executor_class("B/D")).found["flush"]

    def loop(self):
        def flush():
            return self.executed_batch_queue.empty()

        flush()

    assert recognise(grown("B/D", **{RELAY: loop})).era == "C"


def test_a_drain_before_forward_means_the_relay_is_inline():
    """Era G stands down."""
    verdict = recognise(grown(_drain_relay_sends_before_forward=lambda self, microbatch_id: None))
    assert (verdict.era, verdict.patch) == ("G", False)


@pytest.mark.parametrize("name", ["make_mpi_progress_pump", "_pp_mpi_progress"])
def test_a_native_pump_means_that_upstream_progresses_itself(name):
    """Era H stands down, whatever else it has."""
    cls = grown(__init__=init_that_names(name), _drain_relay_sends_before_forward=lambda self, microbatch_id: None)
    verdict = recognise(cls)
    assert (verdict.era, verdict.patch) == ("H", False)
    assert "own progress pump" in verdict.reason


@pytest.mark.parametrize("name", [WAIT, CLEANUP, RELAY, RING])
def test_a_missing_method_makes_a_shape_unknown(name):
    """Half a relay, or none of what is to be wrapped: not patched, and the verdict names it."""
    verdict = recognise(without(name))
    assert (verdict.era, verdict.patch) == ("unknown", False)
    assert name in verdict.reason


@pytest.mark.parametrize(
    "wait",
    [
        lambda self, microbatch_id: None,
        lambda self, handles, slot: None,
        lambda self, send_handles, microbatch_id, extra: None,
        lambda self, microbatch_id, send_handles: None,
        lambda *args: None,
        "not a function",
    ],
    ids=["old", "renamed", "longer", "swapped", "any", "text"],
)
def test_a_wait_with_other_parameters_makes_a_shape_unknown(wait):
    """Only the known parameters, by name and order, are wrapped."""
    verdict = recognise(grown(**{WAIT: wait}))
    assert (verdict.era, verdict.patch) == ("unknown", False)
    assert WAIT in verdict.reason


def test_a_relay_on_another_queue_makes_a_shape_unknown():
    """The queue is what the idle wait replaces; a loop that does not read it cannot be helped."""
    verdict = recognise(grown(**{RELAY: lambda self: self.another_queue.get()}))
    assert (verdict.era, verdict.patch) == ("unknown", False)
    assert "executed_batch_queue" in verdict.reason


def decorated(function):
    """Wrap a function as a tracing decorator does."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("era", PATCHABLE)
def test_decorators_do_not_hide_an_era(era):
    """Upstream wraps some methods for tracing: what is inside decides."""
    cls = executor_class(era)
    for name in (RELAY, RING, WAIT, CLEANUP, "__init__"):
        setattr(cls, name, decorated(decorated(vars(cls)[name])))
    assert recognise(cls).era == era


@pytest.mark.parametrize("era", ERAS)
def test_a_subclass_is_judged_by_what_it_inherits(era):
    """A subclass that changes nothing is of its base's era."""
    assert recognise(type("Mine", (executor_class(era),), {})).era == era


def looped():
    """Return a function whose __wrapped__ leads back to itself."""

    def function(self):
        return None

    function.__wrapped__ = function
    return function


ODD = [
    None,
    1,
    "text",
    object(),
    property(lambda self: None),
    staticmethod(len),
    len,
    functools.partial(print),
    type,
    looped(),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
@pytest.mark.parametrize("name", [RELAY, RING, WAIT, CLEANUP, "__init__"])
def test_looking_never_raises(name, odd):
    """Whatever stands where a method should be, there is a verdict, and it can be written down."""
    verdict = recognise(grown(**{name: odd}))
    json.dumps([verdict.era, verdict.action, verdict.reason, verdict.found])


@pytest.mark.parametrize("cls", [object, int, type, dict, type("Empty", (), {}), Exception])
def test_any_other_class_is_unknown(cls):
    """A class that is no executor is not patched."""
    assert not recognise(cls).patch


@pytest.mark.parametrize("era", ERAS)
def test_looking_changes_nothing(era):
    """A verdict leaves the class as it was and constructs nothing."""

    def fail(self, dist=None):
        raise AssertionError("constructed")

    cls = executor_class(era)
    if era != "E":
        cls.__init__ = fail
    before = dict(vars(cls))
    recognise(cls)
    assert dict(vars(cls)) == before
