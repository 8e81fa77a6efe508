"""Compatibility: which shape of PyExecutor is this, and what do we do about it.

Structure decides, never a version string: eras C and D differ by one statement and share their version numbers. An era
is named as in docs/upstream.md. A shape we do not know is never patched.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

__all__ = ["Compatibility", "recognise"]

RELAY = "_broadcast_sample_state_loop"
RING = "_ring_broadcast_sample_state"
WAIT = "wait_on_pp_send_handles"
CLEANUP = "_executor_loop_cleanup"
LOOP = "_executor_loop_pp"


@dataclass(frozen=True)
class Compatibility:
    """A verdict: the era, what we do ("patch" or "stand down"), why, and what was looked at."""

    era: str
    action: str
    reason: str
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def patch(self) -> bool:
        """Whether the class is to be patched."""
        return self.action == "patch"


def recognise(cls: type) -> Compatibility:
    """Judge a PyExecutor-shaped class by its structure; never raises, never constructs one.

    Source of the eras: NVIDIA/TensorRT-LLM#10349 (B), #12528 (C), #12888 (D), #13267 and #12735 (E), #16170 (F),
    #18135 (G), #19643 (H).
    """
    methods = {name: inspect.getattr_static(cls, name, None) for name in (RELAY, RING, WAIT, CLEANUP)}
    found: dict[str, Any] = {name: method is not None for name, method in methods.items()}
    if methods[WAIT] is None or methods[CLEANUP] is None:
        return Compatibility("unknown", "stand down", f"{cls.__name__} has no {WAIT} or no {CLEANUP}", found)
    parameters = _parameters(methods[WAIT])
    found["parameters"] = parameters
    if methods[RELAY] is None and methods[RING] is None and parameters == ["self", "microbatch_id"]:
        return Compatibility(
            "A", "stand down", "the relay runs and waits within one iteration: nothing is parked", found
        )
    if methods[RELAY] is None or methods[RING] is None:
        return Compatibility("unknown", "stand down", f"only one of {RELAY} and {RING} is there", found)
    if parameters != ["self", "send_handles", "microbatch_id"]:
        return Compatibility("unknown", "stand down", f"{WAIT} takes {parameters}", found)
    names = _names(methods[RELAY])
    init = _names(inspect.getattr_static(cls, "__init__"))
    found |= {"flush": "empty" in names, "broadcast_comm": "_broadcast_mpi_comm" in init}
    if "executed_batch_queue" not in names:
        return Compatibility("unknown", "stand down", f"{RELAY} does not read executed_batch_queue", found)
    if "make_mpi_progress_pump" in init or "_pp_mpi_progress" in init:
        return Compatibility("H", "stand down", "this build has upstream's own progress pump", found)
    if hasattr(cls, "_drain_relay_sends_before_forward"):
        return Compatibility("G", "stand down", "the relay runs on the executor thread by default", found)
    if RING in _names(inspect.getattr_static(cls, LOOP, None)):
        return Compatibility("F", "stand down", f"{LOOP} relays on the executor thread by default", found)
    if found["flush"]:
        return Compatibility("C", "patch", "the relay's blocking flush becomes a bounded drive", found)
    era = "E" if found["broadcast_comm"] else "B/D"
    return Compatibility(era, "patch", "sends are parked while the relay waits for the next batch", found)


def _parameters(method: Any) -> list[str]:
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []


def _names(method: Any) -> set[str]:
    """Names used by a method and by the functions defined in it, whatever decorators are around it."""
    try:
        code = getattr(inspect.unwrap(method), "__code__", None)
    except ValueError:  # decorators that wrap each other in a circle
        code = None
    names: set[str] = set()
    todo = [code] if isinstance(code, CodeType) else []
    while todo:
        code = todo.pop()
        names |= set(code.co_names)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names
