"""NVTX ranges around what the patch does, for nsys: with TRTLLM_PP_PROGRESS_NVTX=1 alone, else nothing is wrapped."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.settings.core import Settings

__all__ = ["DOMAIN", "annotate", "ranged"]

logger = logging.getLogger("trtllm_pp_progress")

DOMAIN = "trtllm-pp-progress"

F = TypeVar("F", bound=Callable[..., Any])


def ranged(settings: Settings, name: str, function: F) -> F:
    """Return a function with a range around each call, or itself where ranges are off or nvtx is absent."""
    if settings.nvtx != "1" or (nvtx := _nvtx()) is None:
        return function
    wrapped: F = nvtx.annotate(name, domain=DOMAIN)(function)
    return wrapped


def annotate(engine: Engine) -> None:
    """Put ranges around the drives of an engine and what it does about a post, where the settings ask for them."""
    for owner, method, name in (
        (engine.burst, "run", "drive"),
        (engine.burst, "finish", "drive"),
        (engine, "posted", "post"),
    ):
        plain = getattr(owner, method)
        if (wrapped := ranged(engine.settings, name, plain)) is not plain:
            setattr(owner, method, wrapped)


@functools.cache
def _nvtx() -> Any:
    try:
        import nvtx
    except ImportError as error:
        logger.warning("no NVTX ranges: %s (pip install nvtx)", error)
        return None
    return nvtx
