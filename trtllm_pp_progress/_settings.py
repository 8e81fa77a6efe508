"""Settings: validated once, frozen, and the only reader of the environment.

Precedence: argument, then environment, then default. A bad value is refused with an error that names the variable, the
value and the valid ones; nothing is clamped in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = [
    "PREFIX",
    "PUMP_PERIOD",
    "SWITCH",
    "Settings",
    "SettingsError",
    "choice",
    "crowded",
    "load",
    "number",
    "pump_period_named",
    "setting",
    "switched_on",
]

PREFIX = "TRTLLM_PP_PROGRESS_"  # upstream forwards every TRTLLM variable to its workers
SWITCH = "TRTLLM_PP_PROGRESS"  # turns the automatic ways in on

PUMP_PERIOD = "TLLM_PP_MPI_PROGRESS_POLL_MS"  # upstream's, era H, in ms: at most 0 means no pump
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")  # as launchers say it

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
        elif variable in environ:
            source, value = variable, environ[variable].strip()
        else:
            continue
        values[name] = _parsed(declaration, source, value)
    return cls(**values)


def switched_on(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return what TRTLLM_PP_PROGRESS says: True for 1, False for 0, None where it is not set or empty.

    Raises SettingsError for any other value.
    """
    value = (os.environ if environ is None else environ).get(SWITCH, "").strip()
    if value not in ("", "0", "1"):
        raise SettingsError(f"{SWITCH}={value!r} is not valid: 1 or 0")
    return value == "1" if value else None


def _parsed(declaration: Any, source: str, value: Any) -> Any:
    try:
        return declaration.metadata["parse"](value)
    except SettingsError as expected:
        raise SettingsError(f"{source}={value!r} is not valid: {expected}") from None


@dataclass(frozen=True)
class Settings:
    """What an operator can tune; every field is TRTLLM_PP_PROGRESS_<FIELD IN CAPITALS> in the environment."""

    max_polls: int = setting(256, number(int, 1, 1_000_000), "most test() calls in one drive (the poll budget)")
    backoff_min_us: float = setting(50.0, number(float, 1, 1e6), "first pause between two drives, in microseconds")
    backoff_max_us: float = setting(500.0, number(float, 1, 1e6), "longest pause between two drives, in microseconds")
    drain_deadline_s: float = setting(
        10.0, number(float, 0, 3600), "longest wait of a whole cleanup, and of a drain, in seconds"
    )
    stall_warning_s: float = setting(10.0, number(float, 0.01, 86400), "a wait this long is logged, in seconds")
    mode: str = setting("auto", choice("auto", "poll", "native", "thread"), "which driver makes sends progress")

    def __post_init__(self) -> None:
        for declaration in fields(self):  # also where no load() has: install() takes what it is given
            object.__setattr__(
                self, declaration.name, _parsed(declaration, declaration.name, getattr(self, declaration.name))
            )
        if self.backoff_min_us > self.backoff_max_us:
            raise SettingsError(
                f"backoff_min_us={self.backoff_min_us:g} is not valid: at most backoff_max_us={self.backoff_max_us:g}"
            )

    def backoff(self) -> Iterator[float]:
        """Yield the pauses between drives, in seconds: from backoff_min_us, doubling up to backoff_max_us."""
        pause = self.backoff_min_us
        while True:
            yield pause * 1e-6
            pause = min(2 * pause, self.backoff_max_us)


def crowded(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the ranks of this machine, two busy threads each, have to share the cores this process may use."""
    environ = os.environ if environ is None else environ
    said = [environ[variable] for variable in LOCAL_RANKS if environ.get(variable, "").isdigit()]
    return len(os.sched_getaffinity(0)) < 2 * int(said[0] if said else 1)


def pump_period_named(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the environment names a period for upstream's pump (era H), which is kept then."""
    return PUMP_PERIOD in (os.environ if environ is None else environ)
