"""Read what a class is made of: parameters, decorators, and the names that its code uses. Runs none of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

__all__ = ["foreign_module", "names_used", "parameters_of"]

TRACERS = ("contextlib", "nvtx")  # upstream's own decorators, which time a method and change nothing


def parameters_of(method: Any) -> list[str]:
    """Return the names of a method's parameters, whatever is wrapped around it; nothing where it has none to show."""
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []


def _functions(method: Any) -> Iterator[Callable[..., Any]]:
    """Yield a method's decorators, outermost first, and at last the function within."""
    seen = set()
    while method is not None and id(method) not in seen:  # decorators that wrap each other in a circle
        seen.add(id(method))
        yield method
        method = getattr(method, "__wrapped__", None)


def foreign_module(method: Any, owner: type) -> str | None:
    """Name the module of a decorator or function that is neither the class's own package's nor a tracer's."""
    for function in _functions(method):
        module = str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))
        if module.split(".")[0] not in (owner.__module__.split(".")[0], *TRACERS):
            return module
    return None


def names_used(cls: type, method: str) -> list[str]:
    """List the names used by a method and by functions in it, in order of use, whatever is wrapped around it."""
    functions = list(_functions(inspect.getattr_static(cls, method, None)))
    code = getattr(functions[-1], "__code__", None) if functions else None
    names: list[str] = []
    todo = [code] if isinstance(code, CodeType) else []
    while todo:
        code = todo.pop()
        names += code.co_names
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names
