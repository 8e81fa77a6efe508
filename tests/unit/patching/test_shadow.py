"""Shadows: one object's methods, nobody else's, and gone again without a trace."""

import inspect

import pytest

from trtllm_pp_progress.patching.shadow import Shadows


class Owner:
    """Something with methods."""

    def first(self, value, *, scale=1):
        """Return it."""
        return value * scale

    def second(self):
        """Return a word."""
        return "second"


def doubling(method):
    """Make a shadow that doubles."""
    return lambda *given, **named: 2 * method(*given, **named)


@pytest.fixture
def owner():
    """Return an object."""
    return Owner()


def test_only_this_object_is_shadowed(owner):
    """Its class and every other instance stay as they are."""
    before = dict(vars(Owner))
    Shadows(owner).place("first", doubling)
    assert (owner.first(3, scale=2), Owner().first(3, scale=2)) == (12, 6)
    assert dict(vars(Owner)) == before


def test_a_shadow_still_says_what_it_is(owner):
    """To whoever inspects it: vLLM does."""
    Shadows(owner).place("first", doubling)
    assert (owner.first.__name__, owner.first.__doc__) == ("first", "Return it.")
    assert inspect.signature(owner.first) == inspect.signature(Owner().first)


def test_removed_nothing_is_left(owner):
    """Not even an attribute of the same value."""
    shadows = Shadows(owner)
    for name in ("first", "second"):
        shadows.place(name, doubling)
    assert shadows.remove() == []
    assert vars(owner) == {}
    assert shadows.remove() == []


def test_what_was_shadowed_by_somebody_before_is_theirs_again(owner):
    """An instance attribute of before comes back as the very same object."""
    owner.first = theirs = lambda value: -value
    shadows = Shadows(owner)
    shadows.place("first", doubling)
    assert owner.first(3) == -6
    assert shadows.remove() == []
    assert owner.first is theirs


def test_what_somebody_has_shadowed_since_is_left_and_named(owner):
    """The others are taken away; once theirs is gone, ours goes, too."""
    shadows = Shadows(owner)
    for name in ("first", "second"):
        shadows.place(name, doubling)
    ours, owner.first = owner.first, lambda value: 0
    assert shadows.remove() == ["first"]
    assert (owner.first(3), owner.second()) == (0, "second")
    owner.first = ours
    assert shadows.remove() == []
    assert vars(owner) == {}


def test_a_method_is_shadowed_once(owner):
    """A second time changes nothing, and so does a method that is not there."""
    shadows = Shadows(owner)
    shadows.place("second", doubling)
    shadows.place("second", doubling)
    shadows.place("third", doubling)
    assert owner.second() == "secondsecond"
    assert not hasattr(owner, "third")
