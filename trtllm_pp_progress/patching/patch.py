"""Replace attributes of a class or module, all or none, and put them back by identity.

Knows nothing of TensorRT-LLM. Attributes are set one by one; bases and class are never touched. The graft is a plain
attribute, so that what others do to the class before and after stays visible and reversible.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MISSING", "Graft", "IncompatibleError", "Patch", "PatchError"]


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()  # the owner itself has no such attribute (it may inherit one)


class PatchError(RuntimeError):
    """A patch cannot be applied or reverted as a whole; nothing was changed."""


class IncompatibleError(RuntimeError):
    """What was to be patched is not of a shape that can be; the message says why. Nothing was changed."""


@dataclass(frozen=True)
class Graft:
    """One attribute to set: `make(original)` returns the new one.

    The original is what the owner has or inherits, as its dict holds it, or MISSING.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


@dataclass(frozen=True)
class _Applied:
    owner: Any
    name: str
    original: Any  # MISSING where the owner inherited it: reverting then deletes ours
    ours: Any


class Patch:
    """A set of grafts applied together: all are made before the first is set, and a failure undoes the rest."""

    def __init__(self, grafts: Sequence[Graft]) -> None:
        made = []
        for graft in grafts:
            own = vars(graft.owner).get(graft.name, MISSING)
            ours = graft.make(inspect.getattr_static(graft.owner, graft.name, MISSING))
            made.append(_Applied(graft.owner, graft.name, own, ours))
        done: list[_Applied] = []
        try:
            for item in made:
                done.append(item)
                setattr(item.owner, item.name, item.ours)
        except BaseException:
            for item in reversed(done):
                _restore(item)
            raise
        self._applied = made

    def check(self) -> None:
        """Raise PatchError if something else was set over one of ours, so that revert() would."""
        for item in self._applied:
            if (current := vars(item.owner).get(item.name, MISSING)) is not item.ours:
                raise PatchError(
                    f"{item.owner.__name__}.{item.name} is not ours any more (found {current!r}): "
                    "remove what was put over it first; nothing was reverted"
                )

    def revert(self) -> None:
        """Put every original back; PatchError, with nothing changed, if something else was set over one of ours."""
        self.check()
        for item in reversed(self._applied):
            _restore(item)
        self._applied = []

    @property
    def names(self) -> list[str]:
        """What was set, as Owner.name."""
        return [f"{item.owner.__name__}.{item.name}" for item in self._applied]


def _restore(item: _Applied) -> None:
    if vars(item.owner).get(item.name, MISSING) is item.original:
        return  # ours never got there; setting again what could not be set would fail again
    if item.original is not MISSING:
        setattr(item.owner, item.name, item.original)
    else:
        delattr(item.owner, item.name)
