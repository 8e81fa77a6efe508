"""Faults that the tests must notice: each function breaks the policy of the process that calls it."""

from __future__ import annotations

from typing import Any

from trtllm_pp_progress.vllm._adapter import Receiver, _Unposted
from trtllm_pp_progress.vllm._policy import Deferral


def stale_event() -> None:
    """Leave the event of step T in the slot: it covers nothing, and nothing waits for the receive."""

    def launch(self: Receiver, saved: Any) -> None:
        self._issue(saved.calls)
        saved.calls.clear()

    Receiver._guard = lambda self, slot: True  # type: ignore[method-assign]
    Receiver._launch = launch  # type: ignore[method-assign]


def lazy_event_alone() -> None:
    """Post a receive when its event is used and never otherwise: one whose rows were all freed is forgotten."""

    def guard(self: Receiver, slot: Any) -> bool:
        def post(reason: str) -> None:
            self._launch(next(r.payload for r in self._deferral.slots if r and r.payload.slot is slot))

        slot.event = _Unposted(slot, post)
        return True

    def consume(self: Receiver, stock: Any, args: Any, kwargs: Any) -> Any:
        outputs = stock(*args, **kwargs)
        self._deferral.slots.popleft()
        self._deferral.slots.append(None)
        return outputs

    Receiver._guard = guard  # type: ignore[method-assign]
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
    Receiver.flush = lambda self, reason: 0 if reason == "idle" else flush(self, reason)  # type: ignore[method-assign]


def newest_first() -> None:
    """Post what is due after what is younger."""
    post_aged = Deferral._post_aged

    def backwards(self: Deferral[Any], age: int, reason: str) -> int:
        if not self._saved or self.step - self._saved[0].step < age:
            return 0
        self._saved.reverse()
        return post_aged(self, 0, reason)

    Deferral._post_aged = backwards  # type: ignore[method-assign]
