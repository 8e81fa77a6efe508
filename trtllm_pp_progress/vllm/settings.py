"""What an operator can tune; every field is TRTLLM_PP_PROGRESS_VLLM_<FIELD IN CAPITALS> in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trtllm_pp_progress.settings.schema import PREFIX, SettingsError, choice, load, number, setting
from trtllm_pp_progress.vllm.policy import delay_for
from trtllm_pp_progress.vllm.transport import Transport, transport

__all__ = [
    "OFF",
    "RANK_AWARE",
    "VLLM_PREFIX",
    "WATCH",
    "Settings",
    "SettingsError",
    "environment",
    "load_settings",
    "transport_here",
    "unknown_variables",
    "variables",
]

VLLM_PREFIX = PREFIX + "VLLM_"
OFF, ON, RANK_AWARE, WATCH = "off", "on", "rank-aware", "watch"
NAMES = {"0": OFF, "1": RANK_AWARE, ON: RANK_AWARE} | {name: name for name in (OFF, RANK_AWARE, WATCH)}
DELAY = re.compile(r"delay-([1-9][0-9]{0,3})|([2-9]|[1-9][0-9]{1,3})")
PLACEMENT = VLLM_PREFIX + "PLACEMENT"  # gone: a delay alone says where in its step a receive is posted
VALUES = f"{OFF} (0), {ON} (1), {RANK_AWARE}, {WATCH}, or a delay in steps, delay-1 to delay-N with N below pp_size"


def _receive(value: Any) -> str | int:
    """Parse the `receive` setting: a name, or a delay in steps whose upper end only pp_size can tell."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value  # in a program a number is a delay; in the environment 1 is a switch, as in the other variable
    if str(value) in NAMES:
        return NAMES[str(value)]
    if not (delay := DELAY.fullmatch(str(value))):
        raise SettingsError(VALUES)
    return int(delay[1] or delay[2])


@dataclass(frozen=True)
class Settings:
    """When ranks that are not the last post the receive of a step's sampled result."""

    receive: str | int = setting(
        OFF,
        _receive,
        "off (vLLM as it is), on or rank-aware (when the last rank has the result), a delay in steps, or watch (vLLM as"
        " it is, and stalls are told)",
    )
    timing: str = setting("on", choice("on", "off"), "time waits and the source's broadcasts with CUDA events")
    stall_warning_s: float = setting(
        8.0,
        number(float, 0.1, 86400),
        "a broadcast under way or a receive held back this long while no step begins is a stall, in seconds",
    )

    def delay(self, rank: int, pp_size: int) -> int:
        """Return the delay of pipeline rank `rank`, in steps; raises SettingsError if `pp_size` does not allow it."""
        if isinstance(self.receive, str):
            return delay_for(rank, pp_size)
        if self.receive >= pp_size:
            raise SettingsError(
                f"{VLLM_PREFIX}RECEIVE={self.receive} is not valid with pp_size={pp_size}: "
                f"{OFF}, {ON}, {RANK_AWARE}, {WATCH}, or a delay in steps from 1 to {pp_size - 1}"
            )
        return self.receive


def load_settings(environ: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Build the settings from arguments, the environment and the defaults; raises SettingsError for a bad value."""
    environ = os.environ if environ is None else environ
    if PLACEMENT in environ:
        raise SettingsError(
            f"{PLACEMENT}={environ[PLACEMENT]!r} is not a setting any more: unset it; for pre-model and a delay of d "
            f"steps set {VLLM_PREFIX}RECEIVE to delay-(d - 1), where the receives were posted"
        )
    return load(Settings, environ, prefix=VLLM_PREFIX, **arguments)


def environment() -> dict[str, str]:
    """Return the environment of this process."""
    return dict(os.environ)


def variables() -> list[str]:
    """Return the environment's names of the settings."""
    return [VLLM_PREFIX + declared.name.upper() for declared in fields(Settings)]


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names in the environment that look like a setting of ours and are none."""
    known = (*variables(), PLACEMENT)
    environ = os.environ if environ is None else environ
    return sorted(name for name in environ if name.startswith(VLLM_PREFIX) and name not in known)


def transport_here(platform: str, per_step: int, message_bytes: int) -> Transport:
    """Return what this process's environment says about the transport of a worker's broadcasts."""
    return transport(os.environ, platform, per_step, message_bytes)
