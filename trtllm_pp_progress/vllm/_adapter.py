"""Between one live PPHandler and its collectives: receives are recorded at T and posted when a Deferral says so.

Nothing of vLLM is copied: the handler's own methods run, with its own masks, snapshots and buffers of step T, and only
the broadcasts that they issue are kept back. Works for every release whose receive issues plain broadcasts on a side
stream and leaves a slot with an `event` at the end of `queue`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trtllm_pp_progress.vllm._policy import Deferral, Tally
from trtllm_pp_progress.vllm._record import Call, Recorder
from trtllm_pp_progress.vllm._shadow import Shadows
from trtllm_pp_progress.vllm._stats import StreamTimer

__all__ = ["Receiver", "Source"]

logger = logging.getLogger("vllm.trtllm_pp_progress")  # below vLLM's logger, which alone has a handler in its workers

MOST_BROADCASTS = 3  # tokens, counts, drafts


@dataclass(eq=False)
class _Saved:
    """What posting a step's receive takes: its broadcasts, in order and as one unit, and the slot they fill."""

    calls: list[Call]
    slot: Any


class _Unposted:
    """Stands for the event of a saved receive: whoever uses it gets the receive posted first.

    The event that the handler recorded at T covers nothing. Waiting for it would not fail, but read an unfilled buffer.
    """

    def __init__(self, slot: Any, post: Callable[[str], Any]) -> None:
        self._slot = slot
        self._post = post

    def __getattr__(self, name: str) -> Any:
        self._post("touched")
        if self._slot.event is self:
            raise RuntimeError("a sampled-result receive was about to be consumed but could not be posted")
        return getattr(self._slot.event, name)


@dataclass
class Receiver:
    """A rank that receives: defers its handler's receives while active, and is not there while not.

    `delay` in steps, 0 < delay < pp_size; `timer` times the main stream's wait for results that were late.
    """

    handler: Any
    delay: int
    placement: str
    timer: StreamTimer | None = None
    tally: Tally = field(default_factory=Tally)
    consumed: int = 0
    unready: int = 0
    skipped: int = 0  # steps whose receive was not needed
    trouble: str = ""  # why the policy stood down for good
    _deferral: Deferral[_Saved] | None = None

    def __post_init__(self) -> None:
        self._shadows = Shadows(self.handler)
        self._recorder = Recorder(self.handler.broadcast_group)

    @property
    def active(self) -> bool:
        """Whether receives are deferred now."""
        return self._deferral is not None

    def activate(self) -> None:
        """Start to defer; without effect while active, or after trouble."""
        if self.active or self.trouble:
            return
        depth = len(self.handler.queue)
        self._deferral = Deferral(depth, self.delay, self.placement, self._launch, self.tally)
        self._shadows.place("receive", lambda stock: lambda *args, **kwargs: self._receive(stock, args, kwargs))
        self._shadows.place(
            "get_prev_sampled_outputs", lambda stock: lambda *args, **kwargs: self._consume(stock, args, kwargs)
        )

    def deactivate(self, reason: str) -> None:
        """Post everything and give the handler its own methods back."""
        try:
            self.flush(reason)
        finally:
            self._deferral = None
            self._shadows.remove()

    def flush(self, reason: str) -> int:
        """Post everything that is saved; return how many receives that were."""
        return self._deferral.flush(reason) if self._deferral is not None else 0

    def _receive(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deferral = self._deferral
        if deferral is None:
            return stock(*args, **kwargs)
        deferral.after_model()
        with self._recorder as calls:
            answer = stock(*args, **kwargs)
        slot = self.handler.queue[-1]
        if not calls and slot is None:
            self.skipped += 1
        elif 0 < len(calls) <= MOST_BROADCASTS and self._guard(slot):
            deferral.save(_Saved(calls, slot))
        else:
            self._stand_down(f"a receive issued {len(calls)} broadcasts and left a {type(slot).__name__}", calls)
        return answer

    def _guard(self, slot: Any) -> bool:
        """Put a guard in the place of the slot's event; False where the slot has none or keeps it."""
        if not hasattr(slot, "event"):
            return False
        try:
            slot.event = _Unposted(slot, self.flush)
        except AttributeError:
            return False
        return True

    def _stand_down(self, trouble: str, calls: list[Call]) -> None:
        """Give up for good: post what was recorded, and let the main stream wait for it whatever the slot says."""
        # The first receive of all tells, when nothing older is saved: posting this one here keeps the order in any
        # case.
        self.deactivate("trouble")
        self._issue(calls)
        self.handler.main_stream.wait_stream(self.handler.broadcast_stream)
        self.trouble = trouble
        logger.error("receives are posted as vLLM does from now on: %s", trouble)

    def _consume(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        receive = self._deferral.begin_step() if self._deferral is not None else None
        if receive is None:
            return stock(*args, **kwargs)
        self.consumed += 1
        if receive.payload.slot.event.query():
            return stock(*args, **kwargs)
        self.unready += 1
        if self.timer is None:
            return stock(*args, **kwargs)
        start = self.timer.start(self.handler.main_stream)
        outputs = stock(*args, **kwargs)
        if outputs is None:  # every row was freed: nothing waited
            self.timer.cancel(start)
        else:
            self.timer.stop(start, self.handler.main_stream)
        return outputs

    def _launch(self, saved: _Saved) -> None:
        saved.slot.event = self._issue(saved.calls)
        saved.calls.clear()  # from here on the slot alone decides how long the buffers live

    def _issue(self, calls: list[Call]) -> Any:
        """Post broadcasts behind the main stream's work so far, as the handler does at T, and return their event."""
        if not torch.is_inference_mode_enabled():  # as a flush between steps; the buffers were made in it
            with torch.inference_mode():
                return self._issue(calls)
        stream = self.handler.broadcast_stream
        with torch.cuda.stream(stream):
            stream.wait_stream(self.handler.main_stream)
            for broadcast, args, kwargs in calls:
                broadcast(*args, **kwargs)
            return stream.record_event()

    def counters(self) -> dict[str, Any]:
        """Return what happened so far, in plain numbers."""
        posts = self.tally.posts
        return {
            "posts": sum(posts.values()),
            "catch_ups": posts["catch_up"],
            "fallbacks": posts["fallback"],
            "flushes": sum(count for reason, count in posts.items() if reason.startswith("flush_")),
            "posts_by_reason": dict(sorted(posts.items())),
            "age_at_post": dict(sorted(self.tally.ages.items())),
            "skipped": self.skipped,
            "consumed": self.consumed,
            "unready_at_consume": self.unready,
            "waited": self.timer.summary() if self.timer else None,
        }


class Source:
    """The last rank: posts as ever; only timed, from a result's being ready to its broadcast's being done."""

    trouble = ""

    def __init__(self, handler: Any, timer: StreamTimer | None = None) -> None:
        self.handler = handler
        self.timer = timer
        self.active = False
        self.issued: Counter[str] = Counter()
        self._shadows = Shadows(handler)

    def activate(self) -> None:
        """Start to time broadcasts."""
        self.active = True
        for name in ("broadcast", "broadcast_drafts"):
            self._shadows.place(name, partial(self._timed, name))

    def deactivate(self, reason: str) -> None:
        """Give the handler its own methods back."""
        self.active = False
        self._shadows.remove()

    def flush(self, reason: str) -> int:
        """Post nothing: the source never holds anything back."""
        return 0

    def _timed(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return stock(*args, **kwargs)
            start = self.timer.start(self.handler.main_stream) if self.timer else None
            answer = stock(*args, **kwargs)
            issued = getattr(self.handler, "sampled_tokens_broadcast", True)  # not every step needs a broadcast
            self.issued[name] += issued
            if self.timer and start and issued:
                self.timer.stop(start, self.handler.broadcast_stream)
            elif self.timer and start:
                self.timer.cancel(start)
            return answer

        return issue

    def counters(self) -> dict[str, Any]:
        """Return what happened so far, in plain numbers."""
        return {
            "broadcasts": self.issued["broadcast"],
            "draft_broadcasts": self.issued["broadcast_drafts"],
            "residency": self.timer.summary() if self.timer else None,
        }
