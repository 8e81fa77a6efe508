"""Shadow methods of one object, and take the shadows away again."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from trtllm_pp_progress.patching.patch import MISSING

__all__ = ["Shadows"]


class Shadows:
    """Methods shadowed on one object by instance attributes; its class and every other instance stay as they are."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._placed: dict[str, tuple[Any, Any]] = {}

    def place(self, name: str, make: Callable[[Any], Any]) -> None:
        """Shadow a method with `make(the method)`; without effect where it is shadowed already or does not exist."""
        method = getattr(self._owner, name, None)
        if method is None or name in self._placed:
            return
        before = vars(self._owner).get(name, MISSING)
        shadow = update_wrapper(make(method), method)  # it still says what it is to whoever inspects it
        setattr(self._owner, name, shadow)
        self._placed[name] = (shadow, before)

    def remove(self) -> list[str]:
        """Take every shadow away but those that somebody else has shadowed since; return the names of these."""
        for name, (shadow, before) in list(self._placed.items()):
            if vars(self._owner).get(name) is not shadow:
                continue
            if before is MISSING:
                delattr(self._owner, name)
            else:
                setattr(self._owner, name, before)
            del self._placed[name]
        return sorted(self._placed)
