"""How settings are declared and read: from arguments, then the environment, then defaults.

A bad value is refused with an error that names the variable, the
value and the valid ones; nothing is clamped in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar

__all__ = ["PREFIX", "SettingsError", "choice", "load", "number", "parsed", "setting"]

PREFIX = "TRTLLM_PP_PROGRESS_"  # upstream forwards every TRTLLM variable to its workers

T = TypeVar("T")
Parser = Callable[[Any], Any]


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message names the variable, the value and the valid ones."""


def number(kind: type, low: float, high: float) -> Parser:
    """Return a parser for a finite `kind` (int or float) between `low` and `high`, both included."""

    def parse(value: Any) -> Any:
        try:
            parsed = kind(value)
            if isinstance(value, bool) or not math.isfinite(parsed) or parsed != float(value):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            parsed = None
        if parsed is None or not low <= parsed <= high:
            noun = "a whole number" if kind is int else "a number"
            raise SettingsError(f"{noun} from {low:g} to {high:g}")
        return parsed

    return parse


def choice(*names: str) -> Parser:
    """Return a parser for one of `names`."""

    def parse(value: Any) -> str:
        if value not in names:
            raise SettingsError("one of " + ", ".join(names))
        return str(value)

    return parse


def setting(default: Any, parse: Parser, meaning: str) -> Any:
    """Declare a field of a settings class: its default, its parser and one line for people."""
    return field(default=default, metadata={"parse": parse, "meaning": meaning})


def load(cls: type[T], environ: Mapping[str, str] | None = None, *, prefix: str = PREFIX, **arguments: Any) -> T:
    """Build a settings class from arguments, the environment (`os.environ` if not given) and its defaults.

    Raises SettingsError for a bad value or an unknown argument. An unknown variable with this prefix is no error:
    another class may own it.
    """
    environ = os.environ if environ is None else environ
    declared = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(arguments) - set(declared))
    if unknown:
        raise SettingsError(f"unknown setting {unknown[0]!r}: valid ones are {', '.join(declared)}")
    values: dict[str, Any] = {}
    for name, declaration in declared.items():
        variable = prefix + name.upper()
        if arguments.get(name) is not None:
            source, value = name, arguments[name]
        elif value := environ.get(variable, "").strip():  # an empty variable is one that is not set
            source = variable
        else:
            continue
        values[name] = parsed(declaration, source, value)
    return cls(**values)


def parsed(declaration: Any, source: str, value: Any) -> Any:
    """Return a field's value as its parser makes it; SettingsError names `source`, the value and the valid ones."""
    try:
        return declaration.metadata["parse"](value)
    except SettingsError as expected:
        raise SettingsError(f"{source}={value!r} is not valid: {expected}") from None
