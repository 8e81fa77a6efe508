"""Compatibility: which shape of PyExecutor is this, and what do we do about it.

Structure decides, never a version string: eras C and D differ by one statement and share their version numbers.
`recognise` judges a class before anything is constructed, `examine` an instance of it, which knows more: whether the
relay thread relays, what its messages travel over, and at which thread level MPI runs. docs/eras.md describes the eras.
A shape that is not known is never patched.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from trtllm_pp_progress._settings import PUMP_PERIOD

__all__ = [
    "ASYNC",
    "PARTIAL",
    "PATCH",
    "QUEUE",
    "STAND_DOWN",
    "TABLES",
    "Compatibility",
    "examine",
    "over_torch",
    "recognise",
]

RELAY = "_broadcast_sample_state_loop"
RING = "_ring_broadcast_sample_state"
WAIT = "wait_on_pp_send_handles"
CLEANUP = "_executor_loop_cleanup"
LOOP = "_executor_loop_pp"
PARAMETERS = {RELAY: 1, RING: 2, WAIT: 3, CLEANUP: 1}  # of what is wrapped or relied on, with self

TABLES = ("send_handles", "send_schedule_handles", "send_expected_batch_num_handles")
QUEUE = "executed_batch_queue"
ASYNC = "pp_async_broadcast_sample_state"
PUMP = "_pp_mpi_progress"
OURS = ("progress_pp_send_handles", *TABLES, QUEUE)  # upstream's classes have none of these
TRACERS = ("contextlib", "nvtx")  # upstream's own decorators, which time a method and change nothing

PATCH, PARTIAL, STAND_DOWN = "patch", "partial", "stand down"


@dataclass(frozen=True)
class Compatibility:
    """A verdict: the era, what we do about it ("patch", "partial" or "stand down"), why, and what was found."""

    era: str
    action: str
    reason: str
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def patch(self) -> bool:
        """Whether the class is to be patched, as a whole or in part."""
        return self.action != STAND_DOWN


def recognise(cls: type) -> Compatibility:
    """Judge a PyExecutor-shaped class by its structure; never raises, never constructs one.

    Source of the eras: NVIDIA/TensorRT-LLM#9659 (A2), #10349 (B), #12528 (C), #12888 (D), #13267 (E1), #12735 (E2),
    #16170 (F), #18135 (G), #19643 (H).
    """
    methods = {name: inspect.getattr_static(cls, name, None) for name in PARAMETERS}
    parameters = {name: _parameters(method) for name, method in methods.items()}
    made = _names(cls, "__init__") + _names(cls, "start_worker")
    relay = _names(cls, RELAY)
    found: dict[str, Any] = {"class": cls.__qualname__, "parameters": parameters}

    def verdict(era: str, action: str, reason: str) -> Compatibility:
        return Compatibility(era, action, reason, found)

    def unknown(reason: str) -> Compatibility:
        return verdict("unknown", STAND_DOWN, reason)

    if methods[RELAY] is methods[RING] is None:
        waits = parameters[WAIT] == ["self", "microbatch_id"]
        if waits or (methods[WAIT] is None and TABLES[0] in made):
            era = "A2" if hasattr(cls, "_pp_schedule_and_propagate") else "A1"
            return verdict(era, STAND_DOWN, "the relay runs and waits within one iteration: nothing is parked")
    if missing := [name for name, method in methods.items() if method is None]:
        return unknown(f"{cls.__name__} has no {missing[0]}")
    for name in OURS:
        if inspect.getattr_static(cls, name, None) is not None:
            return unknown(f"already patched, or driving its sends itself: {cls.__name__} has {name}")
    for name, count in PARAMETERS.items():
        if len(parameters[name]) != count or (
            name == WAIT and parameters[name][1:] != ["send_handles", "microbatch_id"]
        ):
            return unknown(f"{name} takes {parameters[name]}")
    owners = {name: next((owner for owner in cls.__mro__ if name in vars(owner)), cls) for name in methods}
    for name, owner in owners.items():
        if owner is not owners[WAIT]:
            return unknown(f"{owner.__name__} overrides a part of the relay, {name} or {WAIT}")
        if foreign := _foreign(methods[name], owner):
            return unknown(f"already patched: {name} comes from {foreign}")
    if QUEUE not in relay:
        return unknown(f"{RELAY} does not read {QUEUE}")

    pumped = "get_with_mpi_progress" in relay
    if "MpiProgressThread" in made or (not pumped and {PUMP, "make_mpi_progress_pump"} & {*made}):
        return unknown("this build makes MPI progress in a way of its own")
    if pumped or hasattr(cls, "_drain_relay_sends_before_forward") or RING in _names(cls, LOOP):
        era = "H" if pumped else "G" if hasattr(cls, "_drain_relay_sends_before_forward") else "F"
        how = "pending sends move while the executor thread is elsewhere, and a drain before a forward ends in time"
        return verdict(era, PARTIAL, f"unless set otherwise the relay stays on the executor thread; {how}")
    if "empty" in relay:
        return verdict("C", PATCH, "the relay's blocking flush becomes a bounded drive")
    era = "B/D"
    if "_broadcast_mpi_comm" in made:
        ends = [name for name in _names(cls, CLEANUP) if name in ("notify_all", WAIT)]
        era = "E1" if ends[:1] == [WAIT] else "E2"
    return verdict(era, PATCH, "sends are parked while the relay waits for the next batch")


def examine(executor: Any, verdict: Compatibility) -> Compatibility:
    """Judge an instance, whose class got `verdict`; best after start_worker(). Never raises.

    What is not there yet is taken for what it usually is, so that a bare stub gets its class's verdict.
    """
    seen = vars(executor)
    relays, started = seen.get(ASYNC), QUEUE in seen
    found = verdict.found | {
        "dist": type(seen.get("dist")).__name__,
        ASYNC: relays,
        "num_micro_batches": seen.get("num_micro_batches"),
        "thread_multiple": _thread_multiple(),
        "pump": bool(seen.get(PUMP)),
        "driven": False,  # whether the relay thread may drive while it idles
    }

    def judged(action: str, reason: str) -> Compatibility:
        return Compatibility(verdict.era, action, reason, found)

    if not verdict.patch:
        return replace(verdict, found=found)
    if over_torch(executor):
        return judged(STAND_DOWN, "over TorchDist (Ray) a handle has only wait(): upstream's own waits are kept")
    if ASYNC in seen and not isinstance(relays, bool):
        return judged(STAND_DOWN, f"{ASYNC} is {relays!r}, not a flag")
    if not found["thread_multiple"]:
        return judged(PARTIAL, "MPI runs below THREAD_MULTIPLE: the relay thread keeps out of it, waits are bounded")
    if verdict.era == "H" and started and not found["pump"]:
        return judged(PARTIAL, f"upstream's progress pump is off ({PUMP_PERIOD}), and so is ours")
    found["driven"] = True
    if verdict.action == PARTIAL and relays:
        return judged(PATCH, "the relay thread relays, as in era D")
    return judged(verdict.action, verdict.reason)


def over_torch(executor: Any) -> bool:
    """Whether an executor's messages travel over torch.distributed, as they do under Ray."""
    kind: Any = type(vars(executor).get("dist"))
    return _is_torch(kind)


@functools.cache
def _is_torch(kind: Any) -> bool:
    return any(base.__name__ == "TorchDist" for base in kind.__mro__)


def _thread_multiple() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return True  # nothing to be careful about, so far
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def _parameters(method: Any) -> list[str]:
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


def _foreign(method: Any, owner: type) -> str | None:
    """Name the module of a decorator or function that is neither the class's own package's nor a tracer's."""
    for function in _functions(method):
        module = str(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))
        if module.split(".")[0] not in (owner.__module__.split(".")[0], *TRACERS):
            return module
    return None


def _names(cls: type, method: str) -> list[str]:
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
