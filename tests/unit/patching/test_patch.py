"""The patch: all or nothing, and back to the very same objects."""

import inspect
from types import ModuleType

import pytest

from trtllm_pp_progress.patching.patch import MISSING, Graft, Patch, PatchError


class Base:
    """A base class with something to inherit."""

    inherited = "inherited"

    def method(self):
        """Return a word."""
        return "base"


def target(metaclass=type):
    """Return a fresh class with an attribute of every kind."""

    class Target(Base, metaclass=metaclass):
        """The class to patch."""

        plain = "plain"

        def method(self):
            """Return a word."""
            return "own"

        @staticmethod
        def static():
            """Return a word."""
            return "static"

        @classmethod
        def of_class(cls):
            """Return the class."""
            return cls

        @property
        def computed(self):
            """Return a word."""
            return "computed"

    return Target


def same(now, before):
    """Whether two views of a class hold the same names, in the same order, with the very same objects."""
    return list(now) == list(before) and all(now[name] is before[name] for name in before)


def constant(value):
    """Return a maker that ignores the original."""
    return lambda original: value


NAMES = ["plain", "method", "static", "of_class", "computed", "inherited", "new"]


def test_what_is_made_is_set():
    """Each graft's maker gets the original and its result becomes the attribute."""
    cls = target()
    Patch([Graft(cls, "method", lambda original: lambda self: original(self) + "ed"), Graft(cls, "new", constant(7))])
    assert (cls().method(), cls.new) == ("owned", 7)


def test_makers_get_the_raw_original():
    """Descriptors arrive unbound, inherited attributes as the base has them, and what is not there as MISSING."""
    cls, seen = target(), {}
    raw = {name: inspect.getattr_static(cls, name, MISSING) for name in NAMES}
    Patch([Graft(cls, name, lambda original, name=name: seen.setdefault(name, original)) for name in NAMES])
    assert all(seen[name] is raw[name] for name in NAMES)
    assert isinstance(seen["static"], staticmethod)
    assert isinstance(seen["of_class"], classmethod)
    assert isinstance(seen["computed"], property)
    assert seen["new"] is MISSING
    assert repr(MISSING) == "MISSING"


def test_revert_puts_the_very_same_objects_back_in_their_places():
    """vars() of the class is what it was: names, order and identity, with nothing of a base copied down."""
    cls = target()
    before = dict(vars(cls))
    bases, base = cls.__bases__, dict(vars(Base))
    patch = Patch([Graft(cls, name, constant(object())) for name in NAMES])
    assert not same(vars(cls), before)
    patch.revert()
    assert same(vars(cls), before)
    assert "inherited" not in vars(cls)
    assert (cls.__bases__, cls.inherited) == (bases, "inherited")
    assert same(vars(Base), base)


def test_a_module_can_be_patched_too():
    """The owner is whatever has attributes."""
    module = ModuleType("somewhere")
    module.value = original = object()
    patch = Patch([Graft(module, "value", constant(1)), Graft(module, "other", constant(2))])
    assert (module.value, module.other) == (1, 2)
    assert patch.names == ["somewhere.value", "somewhere.other"]
    patch.revert()
    assert module.value is original
    assert not hasattr(module, "other")


@pytest.mark.parametrize("step", range(len(NAMES)))
def test_a_maker_that_fails_changes_nothing(step):
    """Everything is made before anything is set."""
    cls = target()
    before = dict(vars(cls))

    def fail(original):
        raise RuntimeError("cannot be made")

    with pytest.raises(RuntimeError, match="cannot be made"):
        Patch([Graft(cls, name, fail if number == step else constant(number)) for number, name in enumerate(NAMES)])
    assert same(vars(cls), before)


@pytest.mark.parametrize("error", [TypeError("refused"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", range(len(NAMES)))
def test_a_set_that_fails_is_undone_with_all_before_it(step, when, error):
    """Whichever attribute cannot be set, or is set and then interrupted: the class is as it was."""
    refused = NAMES[step]

    class Refusing(type):
        """A metaclass that refuses one name once it is armed."""

        armed = False

        def __setattr__(cls, name, value):
            if Refusing.armed and name == refused:
                if when == "after":
                    Refusing.armed = False
                    super().__setattr__(name, value)
                raise error
            super().__setattr__(name, value)

    cls = target(Refusing)
    before = dict(vars(cls))
    Refusing.armed = True
    with pytest.raises(type(error)) as raised:
        Patch([Graft(cls, name, constant(number)) for number, name in enumerate(NAMES)])
    assert raised.value is error
    assert same(vars(cls), before)


@pytest.mark.parametrize("buried", NAMES)
def test_a_buried_patch_refuses_to_be_reverted(buried):
    """Where somebody patched over ours, revert() names the attribute, changes nothing, and works afterwards."""
    cls = target()
    before = dict(vars(cls))
    patch = Patch([Graft(cls, name, constant(number)) for number, name in enumerate(NAMES)])
    ours = vars(cls)[buried]
    setattr(cls, buried, "theirs")
    state = dict(vars(cls))
    with pytest.raises(PatchError, match=f"Target.{buried} is not ours any more \\(found 'theirs'\\)"):
        patch.revert()
    assert same(vars(cls), state)
    setattr(cls, buried, ours)
    patch.revert()
    assert same(vars(cls), before)


def test_a_patch_that_somebody_deleted_refuses_too():
    """An attribute of ours that is gone is as foreign as one that was replaced."""
    cls = target()
    patch = Patch([Graft(cls, "new", constant(1))])
    del cls.new
    with pytest.raises(PatchError, match="found MISSING"):
        patch.revert()


def test_a_second_revert_does_nothing():
    """What was put back is not put back again over what came later."""
    cls = target()
    patch = Patch([Graft(cls, "plain", constant(1))])
    patch.revert()
    cls.plain = "later"
    patch.revert()
    assert (cls.plain, patch.names) == ("later", [])


def test_a_patch_on_a_patch_reverts_in_order():
    """The last one on comes off first, and then the other; the other way round is refused."""
    cls = target()
    before = dict(vars(cls))
    first = Patch([Graft(cls, "method", constant("first"))])
    second = Patch([Graft(cls, "method", constant("second"))])
    with pytest.raises(PatchError):
        first.revert()
    second.revert()
    assert cls.method == "first"
    first.revert()
    assert same(vars(cls), before)


def test_a_subclass_is_patched_without_its_base():
    """Grafting onto a subclass leaves the base and its other subclasses alone."""

    class Sibling(Base):
        """Another subclass."""

    cls = target()
    patch = Patch([Graft(cls, "inherited", constant("ours"))])
    assert (cls.inherited, Base.inherited, Sibling.inherited) == ("ours", "inherited", "inherited")
    patch.revert()
    assert cls.inherited == "inherited"


def test_names_says_what_is_set():
    """The names are Owner.name, in the order of the grafts."""
    cls = target()
    assert Patch([Graft(cls, name, constant(1)) for name in NAMES]).names == [f"Target.{name}" for name in NAMES]


def test_no_grafts_are_a_patch_that_does_nothing():
    """An empty patch can be applied and reverted."""
    patch = Patch([])
    patch.revert()
    assert patch.names == []
