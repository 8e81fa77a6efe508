"""A rank that receives: its handler's receives are recorded at T and posted when a Deferral says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from types import SimpleNamespace
from typing import Any

from trtllm_pp_progress.patching.shadow import Shadows
from trtllm_pp_progress.vllm.policy import Deferral, Saved, Tally
from trtllm_pp_progress.vllm.posting import Posting
from trtllm_pp_progress.vllm.recording import Call, Recording
from trtllm_pp_progress.vllm.timer import StreamTimer

__all__ = ["Receiver"]

logger = logging.getLogger("vllm.trtllm_pp_progress")  # below vLLM's logger, which alone has a handler in its workers

MOST_BROADCASTS = 3  # of a step: tokens, counts, drafts


@dataclass
class Receiver:
    """Defers its handler's receives while active, and is not there while not; threads take turns.

    `delay` in steps, 0 < delay < pp_size; `timer` times the main stream's wait for results that were late.
    """

    handler: Any
    delay: int
    timer: StreamTimer | None = None
    consumed: int = 0
    unready: int = 0
    skipped: int = 0  # steps whose receive was not needed
    trouble: str = ""  # why the policy stood down for good
    _deferral: Deferral | None = None
    _primed: bool = False

    def __post_init__(self) -> None:
        self._shadows = Shadows(self.handler)
        self._posting = Posting(self.handler)
        self._turn = RLock()
        self.tally = Tally(len(self.handler.queue))

    @property
    def active(self) -> bool:
        """Whether receives are deferred now."""
        return self._deferral is not None

    @property
    def held(self) -> int:
        """How many receives are held back now; any thread may ask."""
        deferral = self._deferral
        return len(deferral.held()) if deferral is not None else 0

    def activate(self) -> None:
        """Start to defer; without effect while active, or after trouble."""
        if self.active or self.trouble:
            return
        self._deferral = Deferral(self.handler.queue, self.delay, self.tally)
        self._primed = False
        self._shadows.place("receive", self._receive)
        self._shadows.place("get_prev_sampled_outputs", self._consume)

    def deactivate(self, reason: str) -> None:
        """Post everything and give the handler its own methods back."""
        with self._turn:
            try:
                self.flush(reason)
            finally:
                self._deferral = None
                self._shadows.remove()

    def give_up(self, trouble: str, patience_s: float) -> int:
        """Post everything at once and step back for good; return how many receives that were, or -1 if it cannot be.

        For a thread that finds the rank standing still: what the GPU is stuck in is not waited for, and the step that
        may be under way on the host not for longer than `patience_s` seconds.
        """
        if not self._turn.acquire(timeout=patience_s):
            return -1
        try:
            self.trouble = trouble
            saved = self._deferral.flush("flush_stall") if self._deferral is not None else []
            self._deferral = None
            self._shadows.remove()
            if saved:
                self._posting.post_beside(saved)
            return len(saved)
        finally:
            self._turn.release()

    def flush(self, reason: str, keep: int = 0, patience_s: float = -1) -> int:
        """Post all that is saved but the newest `keep`; return how many that were.

        None, where another thread's turn does not end within `patience_s` seconds; -1 is for ever.
        """
        return self._flush(f"flush_{reason}", keep, patience_s)

    def end_empty_step(self) -> None:
        """Post what is due after the model of a step that ran none."""
        with self._turn:
            due = self._deferral.after_no_model() if self._deferral is not None else None
            if due is not None:
                self._posting.post([due])

    def _flush(self, reason: str, keep: int = 0, patience_s: float = -1) -> int:
        if not self._turn.acquire(timeout=patience_s):
            return 0
        try:
            saved = self._deferral.flush(reason, keep) if self._deferral is not None else []
            if saved:
                self._posting.post(saved)
            return len(saved)
        finally:
            self._turn.release()

    # From here on to _unusual every instruction is on the path of every step.

    def _receive(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return what saves a step's broadcasts in its slot, in the place of their event."""
        recording = Recording(stock, self.handler.broadcast_group, self._ride)
        queue, run, touched, turn = self.handler.queue, recording.run, self._touched, self._turn

        def receive(*args: Any, **kwargs: Any) -> Any:
            with turn:
                if self._deferral is None:
                    return stock(*args, **kwargs)
                try:
                    answer = run(args, kwargs)
                except Exception:
                    self._post_now("error", recording.calls)  # as many as vLLM itself would have issued
                    raise
                calls, slot = recording.calls, queue[-1]
                if calls and self._primed and hasattr(slot, "event"):
                    slot.event = Saved(slot, calls, touched)
                else:
                    self._unusual(calls, slot)
                return answer

        return receive

    def _consume(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return what catches up with a missed receive before the oldest result is taken."""
        queue = self.handler.queue

        def get_prev_sampled_outputs(*args: Any, **kwargs: Any) -> Any:
            deferral = self._deferral
            if deferral is None:
                return stock(*args, **kwargs)
            if deferral.missed():
                self._catch_up()
            slot = queue[0]  # what is consumed is posted by now, and can wait without anybody's turn
            if slot is None:
                return stock(*args, **kwargs)
            self.consumed += 1
            if slot.event.query():
                return stock(*args, **kwargs)
            return self._late(stock, args, kwargs)

        return get_prev_sampled_outputs

    def _catch_up(self) -> None:
        """Post what the step before has missed, unless another thread has meanwhile."""
        with self._turn:
            due = self._deferral.begin_step() if self._deferral is not None else None
            if due is not None:
                self._posting.post([due])

    def _ride(self) -> None:
        """Post what is due from inside the handler's own receive."""
        due = self._deferral.after_model()  # type: ignore[union-attr]
        if due is not None:
            self._posting.ride(due)

    def _unusual(self, calls: list[Call], slot: Any) -> None:
        """Deal with the first receive, with one that nobody needs, and with what is not understood."""
        if slot is None and not calls:
            self.skipped += 1
            due = self._deferral.after_model() if self._deferral is not None else None
            if due is not None:  # there was no broadcast that it could ride on
                self._posting.post([due])
            return
        known = 0 < len(calls) <= MOST_BROADCASTS and hasattr(slot, "event")
        try:
            if known:
                slot.event = Saved(slot, calls, self._touched)
        except AttributeError:
            known = False
        if not known:
            self._stand_down(calls, slot)
        elif not self._primed:
            self._primed = True
            self._flush("prime")  # it creates the communicator where no warm-up did

    def _touched(self, saved: Saved) -> None:
        """Post a receive whose event is used by somebody the policy does not know of, in its turn."""
        with self._turn:
            receives = self._deferral.flush("flush_touched") if self._deferral is not None else []
            if saved not in receives and saved.slot.event is saved:
                receives.insert(0, saved)  # off the queue, and so older than all that is on it
            self._posting.post(receives)

    def _late(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Consume a result that has not come yet: the main stream will wait."""
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

    def _stand_down(self, calls: list[Call], slot: Any) -> None:
        """Give up for good: post what is not posted, and let the main stream wait for it whatever the slot says."""
        self.trouble = f"a receive issued {len(calls)} broadcasts and left a {type(slot).__name__}"
        self._post_now("trouble", calls)
        self.deactivate("trouble")
        self.handler.main_stream.wait_stream(self.handler.broadcast_stream)
        logger.error("receives are posted as vLLM does from now on: %s", self.trouble)

    def _post_now(self, reason: str, calls: list[Call]) -> None:
        """Post a step's broadcasts, if any, behind everything older: the peers are in them or will be."""
        if calls:
            self.flush(reason)
            self._posting.post([Saved(SimpleNamespace(), calls, self._touched)])

    def counters(self) -> dict[str, Any]:
        """Return what happened so far, in plain numbers."""
        posts = self.tally.posts()
        return {
            "posts": sum(posts.values()),
            "collectives": self._posting.collectives,
            "catch_ups": posts.get("catch_up", 0),
            "fallbacks": posts.get("flush_touched", 0),  # forced by somebody's use of their event: none is usual
            "flushes": sum(count for reason, count in posts.items() if reason.startswith("flush_")),
            "posts_by_reason": posts,
            "age_at_post": self.tally.ages(),
            "skipped": self.skipped,
            "consumed": self.consumed,
            "unready_at_consume": self.unready,
            "waited": self.timer.summary() if self.timer else None,
        }
