"""Have the workers told when the engine stops handing out steps although results are under way.

A pause that keeps its requests does that, and says so to no worker: not at all on 0.28, and only once everything has
come to rest on the others. What is held back then would be waited for.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from trtllm_pp_progress.patching.patch import Graft

__all__ = ["MODULE", "grafts"]

logger = logging.getLogger("vllm.trtllm_pp_progress")

MODULE = "vllm.v1.engine.core"
METHOD = "pause_scheduler"
CALL = "check_health"  # a method that every worker has and that does nothing, before which nothing is held back


def grafts(module: ModuleType) -> list[Graft]:
    """Return what tells the workers of a pause, for each kind of engine that pauses in its own way."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and METHOD in vars(kind)]
    return [Graft(kind, METHOD, _make) for kind in kinds]


def _make(stock: Any) -> Any:
    def pause_scheduler(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if "keep" in (*args, kwargs.get("mode")):
            try:
                engine.model_executor.collective_rpc(CALL, non_block=True)
            except Exception as error:  # a pause is vLLM's, whatever becomes of ours
                logger.warning("workers were not told of a pause: %r", error)
        return stock(engine, *args, **kwargs)

    return pause_scheduler
