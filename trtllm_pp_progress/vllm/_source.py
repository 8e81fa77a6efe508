"""The last rank, which sends the sampled results: nothing is changed there, only counted and timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from trtllm_pp_progress.vllm._shadow import Shadows
from trtllm_pp_progress.vllm._stats import StreamTimer

__all__ = ["Source"]


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
