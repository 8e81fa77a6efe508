"""Sends beside the three tables: requests forwarded down the pipeline, and disaggregated termination votes.

Upstream keeps the handle of each in an attribute and waits for it before the next one. In between nobody drives it,
while the executor thread may be in an NCCL call that depends on it (NVIDIA/TensorRT-LLM#10665, #7455).
"""

from __future__ import annotations

from typing import Any

import wrapt

from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.slot_wait import wait_for_slot
from trtllm_pp_progress.progress.table import HandleTable

__all__ = ["SENDERS", "watch"]

# Attribute of the executor: what its value calls the communicator, and the handle.
SENDERS = {
    "executor_request_queue": ("dist", "send_requests_handler"),
    "request_broadcaster": ("dist", "send_requests_handler"),
    "_disagg_pp_termination_handler": ("_dist", "_send_handle"),
}


def watch(engine: Engine, name: str, sender: Any) -> Any:
    """Let an engine know of what a sender sends, and return the sender; one of another shape is left as it is.

    Only this sender's communicator is exchanged. It sends what it would; the handle goes into a table of one slot as
    well, where it is driven and, at the end, drained, without ever being blocked on.
    """
    communicator, handle = SENDERS[name]
    attributes = getattr(sender, "__dict__", {})
    if handle in attributes and hasattr(attributes.get(communicator), "isend_object"):
        table = engine.table(name.strip("_"), [None])
        attributes[communicator] = _Communicator(attributes[communicator], engine, table)
    return sender


class _Communicator(wrapt.ObjectProxy):  # type: ignore[type-arg]  # generic only in newer releases
    """Upstream's communicator, whose sends an engine knows of; everything else is upstream's."""

    def __init__(self, communicator: Any, engine: Engine, table: HandleTable) -> None:
        super().__init__(communicator)
        self._self_engine, self._self_table = engine, table

    def isend_object(self, *args: Any, **kwargs: Any) -> Any:
        """Start a send."""
        handle = self.__wrapped__.isend_object(*args, **kwargs)
        return None if handle is None else _Send(self._self_engine, self._self_table, handle)


class _Send:
    """The handle of such a send: upstream's blocking wait() becomes the engine's."""

    def __init__(self, engine: Engine, table: HandleTable, handle: Any) -> None:
        self._engine, self._table, self._handle = engine, table, handle
        table[0] = handle

    def wait(self) -> None:
        """Return once the send is complete."""
        wait_for_slot(self._engine, self._table, 0, self._handle.wait)
