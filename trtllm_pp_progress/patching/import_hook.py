"""Call back when a module was imported, without ever importing anything for it.

A finder that looks its module up by importlib.util.find_spec, as wrapt's does, imports the parent package; where that
package's own `__init__` has started a thread that imports the module, and joins it, both wait for ever
(DataDog/dd-trace-py#17742). This one asks the finders behind it, with what the import system has told it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Call `callback(module)` once, right after a module's first import from now on; return what calls it off.

    What the callback raises fails that import. The module's loader is its own again by the time its code runs.
    """
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder:
    def __init__(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        self._name, self._callback = name, callback

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else []:
            find = getattr(finder, "find_spec", None)  # none in a finder of before Python 3.4
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def imported(self, module: ModuleType) -> None:
        self.leave()
        self._callback(module)


class _Loader:
    """A module's own loader, which tells when it is done."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.imported(module)
