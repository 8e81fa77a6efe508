"""What an operator can tune; every field is TRTLLM_PP_PROGRESS_VLLM_<FIELD IN CAPITALS> in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_pp_progress._settings import PREFIX, SettingsError, choice, load, number, setting
from trtllm_pp_progress.vllm._policy import delay_for

__all__ = ["OFF", "RANK_AWARE", "VLLM_PREFIX", "ReceiveSettings", "SettingsError", "load_settings"]

VLLM_PREFIX = PREFIX + "VLLM_"
OFF, ON, RANK_AWARE = "off", "on", "rank-aware"
PRE_MODEL, POST_MODEL = "pre-model", "post-model"


def _receive(value: Any) -> str | int:
    """Parse the `receive` setting: a name, or a delay in steps whose upper end only pp_size can tell."""
    text = str(value)
    if text in (OFF, ON, RANK_AWARE):
        return RANK_AWARE if text == ON else text  # what the switch alone means: the policy that measured best
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SettingsError(f"{OFF}, {ON}, {RANK_AWARE}, or a delay in steps from 1 to pp_size - 1")
    return int(text)


@dataclass(frozen=True)
class ReceiveSettings:
    """When ranks that are not the last post the receive of a step's sampled result."""

    receive: str | int = setting(
        OFF, _receive, "off (vLLM as it is), on or rank-aware (when the last rank has the result), or a delay in steps"
    )
    placement: str = setting(
        POST_MODEL, choice(PRE_MODEL, POST_MODEL), "where in its step a receive is posted, before or after the model"
    )
    timing: str = setting("on", choice("on", "off"), "time waits and the source's broadcasts with CUDA events")
    stall_warning_s: float = setting(
        8.0, number(float, 0.1, 86400), "a broadcast under way this long while no step begins is logged, in seconds"
    )

    def __post_init__(self) -> None:
        if self.receive == RANK_AWARE and self.placement != POST_MODEL:
            raise SettingsError(
                f"placement={self.placement!r} is not valid with receive={RANK_AWARE!r}: only {POST_MODEL}"
            )
        if self.receive == 1 and self.placement == PRE_MODEL:
            raise SettingsError(
                f"placement={PRE_MODEL!r} is not valid with receive=1: that is where vLLM posts; "
                f"{POST_MODEL}, or a delay in steps from 2"
            )

    def delay(self, rank: int, pp_size: int) -> int:
        """Return the delay of pipeline rank `rank`, in steps after the model; SettingsError if `pp_size` is too small.

        Before the model of one step is after that of the step before: nothing is queued in between.
        """
        if isinstance(self.receive, str):
            return delay_for(rank, pp_size)
        if self.receive >= pp_size:
            raise SettingsError(
                f"{VLLM_PREFIX}RECEIVE={self.receive} is not valid with pp_size={pp_size}: "
                f"{OFF}, {ON}, {RANK_AWARE}, or a delay in steps from 1 to {pp_size - 1}"
            )
        return self.receive - (self.placement == PRE_MODEL)


def load_settings(environ: Mapping[str, str] | None = None, **arguments: Any) -> ReceiveSettings:
    """Build the settings from arguments, the environment and the defaults; raises SettingsError for a bad value."""
    return load(ReceiveSettings, environ, prefix=VLLM_PREFIX, **arguments)
