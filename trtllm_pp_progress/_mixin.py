"""What PyExecutor gains: methods and data descriptors, grafted one by one onto the class.

The executor's own loops stay upstream's. The three handle tables and the relay's queue are exchanged where upstream
assigns them, by data descriptors: the relay thread starts right after its queue is made, so any later moment is a race.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import queue
import threading
from collections.abc import Callable
from typing import Any

from trtllm_pp_progress._beside import SENDERS, watch
from trtllm_pp_progress._compat import ASYNC, QUEUE, STAND_DOWN, TABLES, Compatibility, examine, over_torch, recognise
from trtllm_pp_progress._drains import Drains
from trtllm_pp_progress._engine import Engine
from trtllm_pp_progress._idle import ProgressQueue
from trtllm_pp_progress._patch import Graft
from trtllm_pp_progress._pump import TICK_S, PumpedQueue
from trtllm_pp_progress._settings import Settings, crowded, pump_period_named
from trtllm_pp_progress._standby import choose
from trtllm_pp_progress._table import HandleTable

__all__ = ["QUEUE", "TABLES", "engine_of", "grafts"]

logger = logging.getLogger("trtllm_pp_progress")

ENGINE = "_pp_progress_engine"
DRAINS = "_pp_progress_drains"
_numbers = itertools.count()

_creating = threading.Lock()
_inside = threading.local()  # .ring: the engine, while this thread is in _ring_broadcast_sample_state


def engine_of(executor: Any) -> Engine | None:
    """Return the engine of an executor, or None if it has none yet."""
    engine: Engine | None = vars(executor).get(ENGINE)
    return engine


def grafts(cls: type, settings: Settings, born: Callable[[Any], object] = lambda executor: None) -> list[Graft]:
    """Return what to set on a PyExecutor-shaped class of eras B to H.

    `born` is told of each executor that gets an engine. Executors over torch.distributed get none: see `examine`.
    """
    verdict = recognise(cls)
    kept = f"_pp_progress_{next(_numbers)}_"  # never the same twice: what an earlier patch has left behind may be old

    def engine_for(executor: Any) -> Engine:
        with _creating:
            if (engine := engine_of(executor)) is None:
                engine = vars(executor)[ENGINE] = _new_engine(executor, settings)
                born(executor)
            return engine

    def make_progress(original: Any) -> Any:
        def progress_pp_send_handles(
            self: Any, send_handles: Any, microbatch_id: int, max_polls: int | None = None
        ) -> bool:
            """Drive one slot; see Engine.progress_pp_send_handles."""
            return engine_for(self).progress_pp_send_handles(send_handles, microbatch_id, max_polls)

        return progress_pp_send_handles

    def make_wait(original: Any) -> Any:
        @functools.wraps(original)
        def wait_on_pp_send_handles(self: Any, send_handles: Any, microbatch_id: int) -> Any:
            if ring := getattr(_inside, "ring", None):
                # The isend is next, and before its request is in a slot others may take the GIL and keep it.
                ring.standby.arm()
            if send_handles[microbatch_id] is None:
                return

            def upstream_wait() -> Any:
                return original(self, send_handles, microbatch_id)

            if over_torch(self):
                return upstream_wait()
            engine = engine_for(self)
            relay = vars(self).get(QUEUE)
            if isinstance(relay, ProgressQueue) and relay.consumer == threading.get_ident() and not ring:
                # Era C's blocking flush after a relay; the next get() drives this send without blocking.
                engine.progress_pp_send_handles(send_handles, microbatch_id)
            elif engine.deadline is None and not ring and _before_forward(self, send_handles):
                if (drains := vars(self).get(DRAINS)) is None:
                    driven = examine(self, verdict).found["driven"]
                    drains = vars(self)[DRAINS] = Drains(engine, settings.drain_deadline_s if driven else math.inf)
                drains.wait(send_handles, microbatch_id, upstream_wait)
            else:
                engine.wait(send_handles, microbatch_id, upstream_wait)
            if not ring:
                engine.standby.rest(lambda: engine.pending)  # the relay may be back without having seen this send

        return wait_on_pp_send_handles

    def make_ring(original: Any) -> Any:
        @functools.wraps(original)
        def _ring_broadcast_sample_state(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (engine := vars(self).get(ENGINE)) is None:
                if over_torch(self):
                    return original(self, *args, **kwargs)
                engine = engine_for(self)
            _inside.ring = engine
            try:
                return original(self, *args, **kwargs)
            finally:
                _inside.ring = None
                engine.standby.rest(lambda: engine.pending)

        return _ring_broadcast_sample_state

    def make_cleanup(original: Any) -> Any:
        @functools.wraps(original)
        def _executor_loop_cleanup(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not over_torch(self):
                engine_for(self).close()
            return original(self, *args, **kwargs)

        return _executor_loop_cleanup

    def exchanged(name: str, exchange: Callable[[Any, Any], Any]) -> list[Graft]:
        return [
            Graft(cls, kept + name, lambda original: _Plain(name)),
            Graft(cls, name, lambda original: _exchange(name, kept + name, exchange)),
        ]

    def of_engine(name: str, make: Callable[[Engine, str, Any], Any]) -> list[Graft]:
        def exchange(executor: Any, value: Any) -> Any:
            return value if over_torch(executor) else make(engine_for(executor), name, value)

        return exchanged(name, exchange)

    return [
        Graft(cls, "progress_pp_send_handles", make_progress),
        Graft(cls, "wait_on_pp_send_handles", make_wait),
        Graft(cls, "_ring_broadcast_sample_state", make_ring),
        Graft(cls, "_executor_loop_cleanup", make_cleanup),
        *(graft for name in TABLES for graft in of_engine(name, _table)),
        *(graft for name in SENDERS for graft in of_engine(name, watch)),
        *exchanged(QUEUE, functools.partial(_queue, engine_for, verdict)),
    ]


def _exchange(name: str, kept: str, exchange: Callable[[Any, Any], Any]) -> property:
    """Return a property that passes what is assigned through `exchange(executor, value)`.

    The value goes where a plain attribute would be, so that removing the property leaves executors working, and to the
    name `kept` as well: upstream reads it in the middle of a step, and from there C code can fetch it.
    """

    def assign(executor: Any, value: Any) -> None:
        vars(executor)[name] = vars(executor)[kept] = exchange(executor, value)

    def delete(executor: Any) -> None:
        vars(executor).pop(kept, None)
        if vars(executor).pop(name, delete) is delete:
            raise AttributeError(name)

    return property(operator.attrgetter(kept), assign, delete)


class _Plain:
    """What stands in for the kept name in an executor that is older than the patch: its plain attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, executor: Any, owner: type | None = None) -> Any:
        if executor is None:
            return self
        try:
            return vars(executor)[self._name]
        except KeyError:
            raise AttributeError(f"{type(executor).__name__!r} object has no attribute {self._name!r}") from None


def _before_forward(executor: Any, handles: Any) -> bool:
    # Where the executor thread relays, this wait, outside the ring, is its drain.
    relayed = vars(executor).get(TABLES[0])
    return vars(executor).get(ASYNC) is False and handles is relayed and type(handles) is HandleTable


def _table(engine: Engine, name: str, value: Any) -> Any:
    return engine.table(name, value) if type(value) is list else value


def _queue(engine_for: Callable[[Any], Engine], of_class: Compatibility, executor: Any, value: Any) -> Any:
    # Only a queue as upstream makes it: new, of the plain class. Anything else is somebody else's design.
    if type(value) is not queue.Queue or not value.empty():
        return value
    verdict = examine(executor, of_class)
    stands_down = verdict.action == STAND_DOWN
    if verdict.reason != of_class.reason:
        level = logging.ERROR if stands_down else logging.INFO  # upstream drops warnings of all ranks but the leader
        logger.log(level, "this executor (era %s): %s, %s", verdict.era, verdict.action, verdict.reason)
    if stands_down or not verdict.found["thread_multiple"]:
        return value
    engine = engine_for(executor)
    engine.standby = choose(engine.settings.mode, crowded(), engine.say.silent)
    if verdict.era != "H":
        return ProgressQueue(engine, value.maxsize)

    def stopped() -> bool:
        stop = vars(executor).get("_pp_mpi_progress_stop")
        return stop is not None and bool(stop.is_set())

    return PumpedQueue(engine, value.maxsize, stopped, 0.0 if pump_period_named() else TICK_S)


def _new_engine(executor: Any, settings: Settings) -> Engine:
    def identify() -> tuple[Any, Any]:
        dist = vars(executor).get("dist")
        return getattr(dist, "pp_rank", None), getattr(dist, "next_pp_rank", None)

    return Engine(settings, identify)
