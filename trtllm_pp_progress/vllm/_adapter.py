"""Between one live PPHandler and its collectives: receives are recorded at T and posted when a Deferral says so.

Nothing of vLLM is copied: the handler's own methods run, with its own masks, snapshots and buffers of step T, and only
the broadcasts that they issue are kept back. Works for every release whose receive issues plain broadcasts on a side
stream and leaves a slot with an `event` at the end of `queue`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from trtllm_pp_progress.vllm._policy import Deferral, Lost, Saved, Tally
from trtllm_pp_progress.vllm._shadow import Shadows
from trtllm_pp_progress.vllm._stats import StreamTimer

__all__ = ["Receiver"]

logger = logging.getLogger("vllm.trtllm_pp_progress")  # below vLLM's logger, which alone has a handler in its workers

MOST_BROADCASTS = 3  # of a step: tokens, counts, drafts

Call = Callable[[], Any]

_dist = torch.distributed
_replacing = Lock()  # torch's broadcast: whoever replaces it puts back what was there


@dataclass
class Receiver:
    """A rank that receives: defers its handler's receives while active, and is not there while not.

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
    _rides: bool = False  # whether the handler is known to issue its broadcasts on its broadcast stream

    def __post_init__(self) -> None:
        self._shadows = Shadows(self.handler)
        self.tally = Tally(len(self.handler.queue))

    @property
    def active(self) -> bool:
        """Whether receives are deferred now."""
        return self._deferral is not None

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
        try:
            self.flush(reason)
        finally:
            self._deferral = None
            self._shadows.remove()

    def flush(self, reason: str) -> int:
        """Post everything that is saved; return how many receives that were."""
        return self._flush(f"flush_{reason}")

    def _flush(self, reason: str) -> int:
        saved = self._deferral.flush(reason) if self._deferral is not None else []
        if saved:
            self._post(saved)
        return len(saved)

    # From here to _put every instruction is on the path of every step.

    def _receive(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Keep back what a receive broadcasts on the handler's group; other groups' broadcasts pass.

        torch's function is replaced while vLLM's receive runs, which is host code of microseconds, and nothing in there
        waits for a peer. Which thread issues a broadcast does not matter: two threads cannot use one group without an
        order between them.
        """
        queue, ours, due, touched = self.handler.queue, self.handler.broadcast_group, self._ride, self._touched
        calls: list[Call] = []
        torchs = _dist.broadcast

        # Named as torch names them: a keyword that is a parameter costs no dictionary.
        def broadcast(tensor: Any, src: Any = None, group: Any = None, *rest: Any, **options: Any) -> Any:
            if group is not ours:
                return torchs(tensor, src, group, *rest, **options)
            if not calls:
                due()
            if rest or options:
                calls.append(partial(torchs, tensor, src, group, *rest, **options))
            else:
                calls.append(partial(torchs, tensor, src, group))
            return None

        def receive(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, torchs
            if self._deferral is None:
                return stock(*args, **kwargs)
            with _replacing:
                calls, torchs = [], _dist.broadcast
                _dist.broadcast = broadcast
                try:
                    answer = stock(*args, **kwargs)
                except Exception:
                    self._post_now("error", calls)  # as many as vLLM itself would have issued
                    raise
                finally:
                    _dist.broadcast = torchs
            slot = queue[-1]
            if calls and self._primed and hasattr(slot, "event"):
                slot.event = Saved(slot, calls, touched)
            else:
                self._unusual(calls, slot)
            return answer

        return receive

    def _unusual(self, calls: list[Call], slot: Any) -> None:
        """Deal with the first receive, with one that nobody needs, and with what is not understood."""
        if slot is None and not calls:
            self.skipped += 1
            due = self._deferral.after_model() if self._deferral is not None else None
            if due is not None:  # there was no broadcast that it could ride on
                self._post([due])
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

    def _consume(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        queue = self.handler.queue

        def get_prev_sampled_outputs(*args: Any, **kwargs: Any) -> Any:
            deferral = self._deferral
            if deferral is None:
                return stock(*args, **kwargs)
            due = deferral.begin_step()
            if due is not None:
                self._post([due])
            slot = queue[0]
            if slot is None:
                return stock(*args, **kwargs)
            self.consumed += 1
            if slot.event.query():
                return stock(*args, **kwargs)
            return self._late(stock, args, kwargs)

        return get_prev_sampled_outputs

    def _ride(self) -> None:
        """Post what is due from inside the handler's own receive: on its stream, behind the model, at no extra cost."""
        due = self._deferral.after_model()  # type: ignore[union-attr]
        if due is not None:
            if self._rides or self._on_stream():
                self._put(due)
            else:
                self._post([due])

    def _put(self, saved: Saved) -> None:
        """Issue a receive on the current stream, with an event behind it."""
        try:
            for broadcast in saved.payload:
                broadcast()
            saved.slot.event = self.handler.broadcast_stream.record_event()
        except Exception:
            saved.slot.event = Lost()
            raise

    def _post(self, receives: list[Saved]) -> None:
        """Post receives behind the main stream's work so far, as the handler does at T."""
        if not torch.is_inference_mode_enabled():  # as a flush between steps; the buffers were made in it
            with torch.inference_mode():
                return self._post(receives)
        stream = self.handler.broadcast_stream
        with torch.cuda.stream(stream):
            stream.wait_stream(self.handler.main_stream)
            for saved in receives:
                self._put(saved)

    def _touched(self, saved: Saved) -> None:
        """Post a receive whose event is used by somebody the policy does not know of, in its turn."""
        receives = self._deferral.flush("flush_touched") if self._deferral is not None else []
        if saved not in receives:  # off the queue already, and so older than everything on it
            receives.insert(0, saved)
        self._post(receives)

    def _on_stream(self) -> bool:
        """Whether the handler is on its broadcast stream where it issues its broadcasts."""
        self._rides = torch.cuda.current_stream() == self.handler.broadcast_stream
        return self._rides

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
            self._post([Saved(SimpleNamespace(), calls, self._touched)])

    def counters(self) -> dict[str, Any]:
        """Return what happened so far, in plain numbers."""
        posts = self.tally.posts()
        return {
            "posts": sum(posts.values()),
            "catch_ups": posts.get("catch_up", 0),
            "fallbacks": self.tally.counts["catch_up"][-1],  # posted by the very step that consumes
            "flushes": sum(count for reason, count in posts.items() if reason.startswith("flush_")),
            "posts_by_reason": posts,
            "age_at_post": self.tally.ages(),
            "skipped": self.skipped,
            "consumed": self.consumed,
            "unready_at_consume": self.unready,
            "waited": self.timer.summary() if self.timer else None,
        }
