"""Compatibility: which shape of PyExecutor is this, and what do we do about it.

Structure decides, never a version string: eras C and D differ by one statement and share their version numbers.
`recognise` judges a class before anything is constructed, `examine` an instance of it, which knows more: whether the
relay thread relays, what its messages travel over, and at which thread level MPI runs. docs/eras.md describes the eras.
A shape that is not known is never patched.
"""

from __future__ import annotations

import enum
import functools
import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from trtllm_pp_progress.mpi.facts import thread_multiple
from trtllm_pp_progress.pyexecutor.structure import foreign_module, names_used, parameters_of
from trtllm_pp_progress.settings.core import PUMP_PERIOD

__all__ = [
    "ASYNC",
    "CLEANUP",
    "DRAIN",
    "QUEUE",
    "RING",
    "TABLES",
    "WAIT",
    "Action",
    "Compatibility",
    "ExecutorFacts",
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
PUMPED_GET = "get_with_mpi_progress"
THREAD, THREAD_STARTER = "_mpi_progress_thread", "_start_mpi_progress_thread"  # era I
OWN_THREAD = {THREAD, THREAD_STARTER, "MpiProgressThread"}
DRAIN = "_drain_relay_sends_before_forward"


class Action(str, enum.Enum):
    """What we do about a class or an executor."""

    PATCH = "patch"
    PARTIAL = "partial"
    STAND_DOWN = "stand down"


@dataclass(frozen=True)
class ExecutorFacts:
    """What an instance shows, best after start_worker()."""

    dist: str  # the type that messages travel over
    relays: Any  # upstream's flag: whether the relay thread relays
    num_micro_batches: int | None
    thread_multiple: bool
    pump: bool  # upstream's own progress pump is on
    drives: bool  # whether the relay thread may drive while it idles


@dataclass(frozen=True)
class Compatibility:
    """A verdict: the era, what we do about it, and why.

    Of a class, as `recognise` judges it; with `executor`, of an instance of it, as `examine` does.
    """

    era: str
    action: Action
    reason: str
    cls: str = ""
    parameters: dict[str, list[str]] = field(default_factory=dict)  # of the methods that are wrapped or relied on
    relay_waits: bool = False  # for each send, in the iteration that posted it: nothing is parked
    pumped: bool = False  # upstream's pump ticks in the relay's idle wait (get_with_mpi_progress): off, and so is ours
    executor: ExecutorFacts | None = None

    @property
    def patch(self) -> bool:
        """Whether the class is to be patched, as a whole or in part."""
        return self.action is not Action.STAND_DOWN

    @property
    def drives(self) -> bool:
        """Whether the relay thread may drive while it idles; False of a class."""
        return self.executor is not None and self.executor.drives

    @property
    def may_drive(self) -> bool:
        """Whether a thread of ours may enter MPI for this executor; False of a class."""
        return self.patch and self.executor is not None and self.executor.thread_multiple

    def describe(self) -> dict[str, Any]:
        """Return it in plain values, as docs/status.md lists them."""
        found: dict[str, Any] = {"class": self.cls, "parameters": self.parameters}
        if (seen := self.executor) is not None:
            found |= {
                "dist": seen.dist,
                ASYNC: seen.relays,
                "num_micro_batches": seen.num_micro_batches,
                "thread_multiple": seen.thread_multiple,
                "pump": seen.pump,
                "driven": seen.drives,
            }
        return {"era": self.era, "action": self.action.value, "reason": self.reason, "found": found}


def recognise(cls: type) -> Compatibility:
    """Judge a PyExecutor-shaped class by its structure; never raises, never constructs one.

    Source of the eras: NVIDIA/TensorRT-LLM#9659 (A2), #10349 (B), #12528 (C), #12888 (D), #13267 (E1), #12735 (E2),
    #16170 (F), #18135 (G), #19643 (H); I is a later build, whose thread is tensorrt_llm.bindings.MpiProgressThread.
    """
    methods = {name: inspect.getattr_static(cls, name, None) for name in PARAMETERS}
    parameters = {name: parameters_of(method) for name, method in methods.items()}
    made = names_used(cls, "__init__") + names_used(cls, "start_worker")
    verdict = functools.partial(Compatibility, cls=cls.__qualname__, parameters=parameters)
    if methods[RELAY] is methods[RING] is None:
        waits = parameters[WAIT] == ["self", "microbatch_id"]
        if waits or (methods[WAIT] is None and TABLES[0] in made):
            era = "A2" if hasattr(cls, "_pp_schedule_and_propagate") else "A1"
            reason = "the relay runs and waits within one iteration: nothing is parked"
            return verdict(era, Action.STAND_DOWN, reason, relay_waits=True)
    if problem := _unknown(cls, methods, parameters, made):
        return verdict("unknown", Action.STAND_DOWN, problem)
    relay = names_used(cls, RELAY)
    pumped = PUMPED_GET in relay
    if pumped or hasattr(cls, DRAIN) or RING in names_used(cls, LOOP):
        how = "pending sends move while the executor thread is elsewhere"
        era = "H" if pumped else "G" if hasattr(cls, DRAIN) else "F"
        if THREAD_STARTER in OWN_THREAD & _names_of(cls):
            era, how = "I", "upstream's own thread makes sends move, at a fixed interval, and ours sooner"
        reason = f"unless set otherwise the relay stays on the executor thread; {how}, and a drain ends in time"
        return verdict(era, Action.PARTIAL, reason, pumped=pumped)
    if "empty" in relay:
        return verdict("C", Action.PATCH, "the relay's blocking flush becomes a bounded drive")
    era = "B/D"
    if "_broadcast_mpi_comm" in made:
        ends = [name for name in names_used(cls, CLEANUP) if name in ("notify_all", WAIT)]
        era = "E1" if ends[:1] == [WAIT] else "E2"
    return verdict(era, Action.PATCH, "sends are parked while the relay waits for the next batch")


def _unknown(cls: type, methods: dict[str, Any], parameters: dict[str, list[str]], made: list[str]) -> str:
    """Return what is not as in any era that is patched, or nothing."""
    if missing := [name for name, method in methods.items() if method is None]:
        return f"{cls.__name__} has no {missing[0]}"
    for name in OURS:
        if inspect.getattr_static(cls, name, None) is not None:
            return f"already patched, or driving its sends itself: {cls.__name__} has {name}"
    for name, count in PARAMETERS.items():
        if len(parameters[name]) != count or (
            name == WAIT and parameters[name][1:] != ["send_handles", "microbatch_id"]
        ):
            return f"{name} takes {parameters[name]}"
    owners = {name: next((owner for owner in cls.__mro__ if name in vars(owner)), cls) for name in methods}
    for name, owner in owners.items():
        if owner is not owners[WAIT]:
            return f"{owner.__name__} overrides a part of the relay, {name} or {WAIT}"
        if foreign := foreign_module(methods[name], owner):
            return f"already patched: {name} comes from {foreign}"
    relay = names_used(cls, RELAY)
    if QUEUE not in relay:
        return f"{RELAY} does not read {QUEUE}"
    threads = OWN_THREAD & _names_of(cls)
    known = PUMPED_GET in relay and {THREAD, THREAD_STARTER} <= threads and THREAD in names_used(cls, "__init__")
    pumps = {name for name in made if name.endswith("make_mpi_progress_pump")}
    if (threads and not known) or (PUMPED_GET not in relay and (pumps or PUMP in made)):
        return "this build makes MPI progress in a way of its own"
    return ""


def _names_of(cls: type) -> set[str]:
    """Return every name that a class has, or that a method of its own uses."""
    return {name for own in dir(cls) for name in (own, *names_used(cls, own))}


def examine(executor: Any, of_class: Compatibility) -> Compatibility:
    """Judge an instance, whose class got the verdict `of_class`; best after start_worker(). Never raises.

    What is not there yet is taken for what it usually is, so that a bare stub gets its class's verdict.
    """
    seen = vars(executor)
    relays, started, multiple = seen.get(ASYNC), QUEUE in seen, thread_multiple()
    found = ExecutorFacts(
        dist=type(seen.get("dist")).__name__,
        relays=relays,
        num_micro_batches=seen.get("num_micro_batches"),
        thread_multiple=multiple,
        pump=bool(seen.get(PUMP)),
        drives=False,
    )

    def judged(action: Action, reason: str, drives: bool = False) -> Compatibility:
        return replace(of_class, action=action, reason=reason, executor=replace(found, drives=drives))

    if not of_class.patch:
        return replace(of_class, executor=found)
    if over_torch(executor):
        reason = "over TorchDist (Ray) a handle has only wait(): upstream's own waits are kept"
        return judged(Action.STAND_DOWN, reason)
    if ASYNC in seen and not isinstance(relays, bool):
        return judged(Action.STAND_DOWN, f"{ASYNC} is {relays!r}, not a flag")
    if not multiple:
        reason = "MPI runs below THREAD_MULTIPLE: the relay thread keeps out of it, waits are bounded"
        return judged(Action.PARTIAL, reason)
    if of_class.pumped and started and not found.pump:
        return judged(Action.PARTIAL, f"upstream's progress pump is off ({PUMP_PERIOD}), and so is ours")
    if of_class.action is Action.PARTIAL and relays:
        return judged(Action.PATCH, "the relay thread relays, as in era D", drives=True)
    return judged(of_class.action, of_class.reason, drives=True)


def over_torch(executor: Any) -> bool:
    """Whether an executor's messages travel over torch.distributed, as they do under Ray."""
    kind: Any = type(vars(executor).get("dist"))
    return _is_torch(kind)


@functools.cache
def _is_torch(kind: Any) -> bool:
    return any(base.__name__ == "TorchDist" for base in kind.__mro__)
