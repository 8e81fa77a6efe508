"""The settings of the patch for TensorRT-LLM, and its switch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from trtllm_pp_progress.settings.schema import SettingsError, choice, number, parsed, setting

__all__ = ["PUMP_PERIOD", "SWITCH", "Settings", "pump_period_named", "switched_on"]

SWITCH = "TRTLLM_PP_PROGRESS"  # turns the automatic ways in on
SWITCHES = {"": None, "0": False, "1": True, "false": False, "true": True}
PUMP_PERIOD = "TLLM_PP_MPI_PROGRESS_POLL_MS"  # upstream's, era H, in ms: at most 0 means no pump


def switched_on(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return what TRTLLM_PP_PROGRESS says: True for 1, False for 0, None where it is not set or empty.

    `true` and `false` are what 1 and 0 become in a YAML file of environment overrides. Raises SettingsError for any
    other value.
    """
    value = (os.environ if environ is None else environ).get(SWITCH, "").strip()
    if value.lower() not in SWITCHES:
        raise SettingsError(f"{SWITCH}={value!r} is not valid: 1 or 0")
    return SWITCHES[value.lower()]


@dataclass(frozen=True)
class Settings:
    """What an operator can tune; every field is TRTLLM_PP_PROGRESS_<FIELD IN CAPITALS> in the environment."""

    max_polls: int = setting(256, number(int, 1, 1_000_000), "most tests in one drive by the relay thread")
    backoff_min_us: float = setting(50.0, number(float, 1, 1e6), "first pause between two drives, in microseconds")
    backoff_max_us: float = setting(500.0, number(float, 1, 1e6), "longest pause between two drives, in microseconds")
    drain_deadline_s: float = setting(
        10.0, number(float, 0, 3600), "longest wait of a whole cleanup; allowance for waits before forwards; in seconds"
    )
    stall_warning_s: float = setting(10.0, number(float, 0.01, 86400), "a send pending this long is logged, in seconds")
    door: str = setting("1", choice("0", "1"), "whether `watch` and its like may ask this process")
    nvtx: str = setting("0", choice("0", "1"), "whether drives, posts, drains and waits are NVTX ranges, for nsys")
    mode: str = setting("auto", choice("auto", "poll", "native"), "which driver makes sends progress")

    def __post_init__(self) -> None:
        for declaration in fields(self):  # also where no load() has: install() takes what it is given
            object.__setattr__(
                self, declaration.name, parsed(declaration, declaration.name, getattr(self, declaration.name))
            )
        if self.backoff_min_us > self.backoff_max_us:
            low, high = f"backoff_min_us={self.backoff_min_us:g}", f"backoff_max_us={self.backoff_max_us:g}"
            if self.backoff_min_us == Settings.backoff_min_us:  # nobody has set it: the other one is the mistake
                raise SettingsError(f"{high} is not valid: at least {low}")
            raise SettingsError(f"{low} is not valid: at most {high}")


def pump_period_named(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the environment names a period for upstream's pump (era H), which is kept then."""
    return PUMP_PERIOD in (os.environ if environ is None else environ)
