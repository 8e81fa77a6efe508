"""Faults that the tests must notice: each function breaks the policy of the process that calls it."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_pp_progress.vllm.policy import Deferral, Saved
from trtllm_pp_progress.vllm.posting import Posting
from trtllm_pp_progress.vllm.receiver import Receiver


def stale_event() -> None:
    """Leave the event of step T in the slot: it covers nothing, and nothing waits for the receive."""
    put = Posting._put

    def late(self: Posting, saved: Any, stream: Any) -> None:
        put(self, saved, stream)
        saved.slot.event = torch.cuda.Event()

    Posting._put = late  # type: ignore[method-assign]


def lazy_event_alone() -> None:
    """Post a receive when its event is used and never otherwise: one whose rows were all freed is forgotten."""

    def consume(self: Receiver, stock: Any) -> Any:
        return lambda *args, **kwargs: stock(*args, **kwargs)

    Receiver._consume = consume  # type: ignore[method-assign]
    never_due()


def never_due() -> None:
    """Let nothing become due, before or after the model."""
    Deferral.after_model = lambda self: None  # type: ignore[method-assign]


def no_final_flush() -> None:
    """Forget at shutdown what is saved."""
    Receiver.deactivate = lambda self, reason: None  # type: ignore[method-assign]


def no_idle_flush() -> None:
    """Keep back what is saved when the engine falls silent."""
    flush = Receiver.flush

    def all_but_idle(self: Receiver, reason: str, *how: Any, **more: Any) -> int:
        return 0 if reason == "idle" else flush(self, reason, *how, **more)

    Receiver.flush = all_but_idle  # type: ignore[method-assign]


def newest_first() -> None:
    """Post what is due after what is younger."""
    after_model = Deferral.after_model

    def backwards(self: Deferral) -> Any:
        due = after_model(self)
        younger = [slot.event for slot in self.queue if slot is not None and type(slot.event) is Saved]
        for saved in reversed(younger[1:] if due is not None else []):
            saved.post.__self__._posting.post([saved])
        return due

    Deferral.after_model = backwards  # type: ignore[method-assign]
