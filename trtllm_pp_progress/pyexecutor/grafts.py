"""What PyExecutor gains: methods and data descriptors, grafted one by one onto the class.

The executor's own loops stay upstream's. The three handle tables and the relay's queue are exchanged where upstream
assigns them, by data descriptors: the relay thread starts right after its queue is made, so any later moment is a race.
"""

from __future__ import annotations

import enum
import functools
import queue
import threading
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident
from typing import Any

from trtllm_pp_progress.patching.patch import Graft
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.slot_wait import begin_end, wait_for_slot
from trtllm_pp_progress.progress.table import HandleTable
from trtllm_pp_progress.pyexecutor.attachment import NAME, Attachment, Unattached, attach, attachment_of, engine_of
from trtllm_pp_progress.pyexecutor.pumped_queue import TICK_S, PumpedQueue
from trtllm_pp_progress.pyexecutor.ranges import ranged
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue
from trtllm_pp_progress.pyexecutor.shape import (
    ASYNC,
    CLEANUP,
    DRAIN,
    QUEUE,
    RING,
    TABLES,
    WAIT,
    Compatibility,
    over_torch,
)
from trtllm_pp_progress.pyexecutor.side_sends import SENDERS, watch
from trtllm_pp_progress.settings.core import Settings, pump_period_named

__all__ = ["Grafts"]

_inside = threading.local()  # .relaying: the engine, while this thread is in _ring_broadcast_sample_state


class Wait(enum.Enum):
    """Whose wait a call of wait_on_pp_send_handles is."""

    UPSTREAMS = "over torch.distributed nothing is ours"
    FLUSH = "era C's relay thread, right after a relay: its next get() drives the send without blocking"
    DRAIN = "the executor thread of an inline relay, before a forward"
    SLOT = "whoever needs the slot, or cleans up"


class Grafts:
    """The patch list of a PyExecutor-shaped class of eras B to I.

    `born` is told of each executor that gets an engine. Executors over torch.distributed get none: see `examine`.
    """

    def __init__(
        self,
        cls: type,
        verdict: Compatibility,
        settings: Settings,
        born: Callable[[Any], object] = lambda executor: None,
    ) -> None:
        self._cls, self._verdict, self._settings, self._born = cls, verdict, settings, born
        self._wait_for_slot = ranged(settings, "wait", wait_for_slot)
        self._wait_before_forward = ranged(settings, "drain", Attachment.wait_before_forward)

    def all(self) -> list[Graft]:
        """Return what to set on the class."""
        return [
            Graft(self._cls, "progress_pp_send_handles", self._progress),
            Graft(self._cls, WAIT, self._wait),
            Graft(self._cls, RING, self._ring),
            Graft(self._cls, CLEANUP, self._cleanup),
            *(self._exchanged(name, self._table) for name in TABLES),
            *(self._exchanged(name, self._sender) for name in SENDERS),
            self._exchanged(QUEUE, self._queue),
            Graft(self._cls, NAME, lambda original: Unattached()),
            *([Graft(self._cls, DRAIN, self._drain)] if hasattr(self._cls, DRAIN) else []),
        ]

    def _attachment(self, executor: Any, ends: bool = False) -> Attachment:
        if (attachment := attachment_of(executor)) is None:
            attachment = attach(executor, self._settings, self._verdict, self._born)
            if not ends:  # a garbage collection may end it, which may hold what starting a thread needs
                attachment.start_keeper()
        return attachment

    # Methods

    def _progress(self, original: Any) -> Any:
        def progress_pp_send_handles(
            executor: Any, send_handles: Any, microbatch_id: int, max_polls: int | None = None
        ) -> bool:
            """Drive one slot; see Engine.progress_pp_send_handles."""
            engine = self._attachment(executor).engine
            return engine.progress_pp_send_handles(send_handles, microbatch_id, max_polls)

        return progress_pp_send_handles

    def _wait(self, original: Any) -> Any:
        @functools.wraps(original)
        def wait_on_pp_send_handles(executor: Any, send_handles: Any, microbatch_id: int) -> Any:
            relaying: Engine | None = getattr(_inside, "relaying", None)
            if by_thread := relaying is not None and relaying.relay.thread == get_ident():
                # The isend is next, and before its request is in a slot the executor may take the GIL and keep it.
                relaying.posting.add(get_ident())
                relaying.driver.arm()
            if send_handles[microbatch_id] is None:
                return None

            if (seen := vars(executor).get(NAME)) is not None and seen.engine.finish(send_handles, microbatch_id):
                if not by_thread:
                    seen.engine.rest()
                return None  # the usual case, at the least cost
            whose = _whose(executor, send_handles, relaying)
            if whose is Wait.UPSTREAMS:
                return original(executor, send_handles, microbatch_id)
            attachment = self._attachment(executor)
            engine = attachment.engine
            slot, handle = range(len(send_handles))[microbatch_id], send_handles[microbatch_id]

            def upstream_wait() -> Any:
                # In a list of its own: a wait that the deadline left behind must not clear the slot of a later send.
                return original(executor, [None] * slot + [handle], slot)

            if whose is Wait.FLUSH:
                engine.progress_pp_send_handles(send_handles, microbatch_id)
            elif whose is Wait.DRAIN:
                self._wait_before_forward(attachment, executor, send_handles, microbatch_id, upstream_wait)
            else:
                self._wait_for_slot(engine, send_handles, microbatch_id, upstream_wait)
            if not by_thread:
                engine.rest()  # the relay may be back without having seen this send

        return wait_on_pp_send_handles

    def _ring(self, original: Any) -> Any:
        @functools.wraps(original)
        def _ring_broadcast_sample_state(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if over_torch(executor):
                return original(executor, *args, **kwargs)
            engine = _inside.relaying = (vars(executor).get(NAME) or self._attachment(executor)).engine
            try:
                return original(executor, *args, **kwargs)
            finally:
                _inside.relaying = None
                if engine.posting:
                    engine.posting.discard(get_ident())
                    engine.rest()

        return _ring_broadcast_sample_state

    def _cleanup(self, original: Any) -> Any:
        @functools.wraps(original)
        def _executor_loop_cleanup(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if not over_torch(executor):
                begin_end(self._attachment(executor, ends=True).engine)
            return original(executor, *args, **kwargs)

        return _executor_loop_cleanup

    def _drain(self, original: Any) -> Any:
        @functools.wraps(original)
        def _drain_relay_sends_before_forward(executor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(executor, *args, **kwargs)
            if (seen := vars(executor).get(NAME)) is not None:
                seen.look_before_forward()
            return result

        return _drain_relay_sends_before_forward

    # Attributes: what is assigned passes through one of these

    def _exchanged(self, name: str, exchange: Callable[[Any, str, Any], Any]) -> Graft:
        """Return a property that keeps the exchanged value where a plain attribute would be.

        So removing the property leaves executors working. It reads a second copy, for upstream reads its tables some 20
        times a token: a call of Python's takes ten times as long there as one of C's.
        """

        def assign(executor: Any, value: Any) -> None:
            value = vars(executor)[name] = value if over_torch(executor) else exchange(executor, name, value)
            setattr(getattr(executor, NAME).values, name, value)

        def delete(executor: Any) -> None:
            if vars(executor).pop(name, delete) is delete:
                raise AttributeError(name)
            vars(getattr(executor, NAME).values).pop(name, None)

        return Graft(self._cls, name, lambda original: property(attrgetter(f"{NAME}.values.{name}"), assign, delete))

    def _table(self, executor: Any, name: str, value: Any) -> Any:
        return self._attachment(executor).engine.table(name, value) if type(value) is list else value

    def _sender(self, executor: Any, name: str, value: Any) -> Any:
        return watch(self._attachment(executor).engine, name, value)

    def _queue(self, executor: Any, name: str, value: Any) -> Any:
        attachment = self._attachment(executor)
        attachment.engine.reopen()
        # Only a queue as upstream makes it: new, of the plain class. Anything else is somebody else's design.
        if type(value) is not queue.Queue or not value.empty():
            return value
        verdict, engine = attachment.begin_life(executor), attachment.engine
        if not verdict.may_drive:
            return value
        inline = vars(executor).get(ASYNC) is False
        if not verdict.pumped:
            return RelayQueue(engine, value.maxsize, inline)

        def stopped() -> bool:
            stop = vars(executor).get("_pp_mpi_progress_stop")
            return stop is not None and bool(stop.is_set())

        return PumpedQueue(engine, value.maxsize, stopped, 0.0 if pump_period_named() else TICK_S, inline)


def _whose(executor: Any, handles: Any, relaying: Engine | None) -> Wait:
    """Tell whose wait for a slot this is."""
    if over_torch(executor):
        return Wait.UPSTREAMS
    seen, engine = vars(executor), engine_of(executor)
    if engine is None or relaying is not None:
        return Wait.SLOT
    if isinstance(seen.get(QUEUE), RelayQueue) and engine.relay.is_current():
        return Wait.FLUSH
    drained = handles is seen.get(TABLES[0]) and type(handles) is HandleTable
    # Where the executor thread relays, a wait of its own, not for a relay, is its drain.
    return Wait.DRAIN if drained and seen.get(ASYNC) is False and engine.deadline is None else Wait.SLOT
