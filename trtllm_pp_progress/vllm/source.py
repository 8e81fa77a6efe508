"""Ranks on which nothing is changed: the last one, whose broadcasts are counted and timed, and one that is watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from trtllm_pp_progress.patching.shadow import Shadows
from trtllm_pp_progress.vllm.recording import Recording
from trtllm_pp_progress.vllm.timer import StreamTimer

__all__ = ["Source", "Watched"]


class Watched:
    """A rank that is left as it is: it holds nothing back, counts nothing and is only looked at."""

    active = False
    trouble = ""
    delay: int | None = None
    held = 0

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def activate(self) -> None:
        """Change nothing."""

    def deactivate(self, reason: str) -> None:
        """Change nothing."""

    def flush(self, reason: str, keep: int = 0, patience_s: float = -1) -> int:
        """Post nothing: nothing is held back here."""
        return 0

    def end_empty_step(self) -> None:
        """Post nothing: nothing is held back here."""

    def counters(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class Source(Watched):
    """The last rank: posts as ever; only timed, from a result's being ready to its broadcast's being done."""

    def __init__(self, handler: Any, timer: StreamTimer | None = None) -> None:
        super().__init__(handler)
        self.timer = timer
        self.issued: Counter[str] = Counter()  # steps, by method; and single collectives
        self._shadows = Shadows(handler)

    def activate(self) -> None:
        """Start to count and time broadcasts."""
        self.active = True
        for name in ("broadcast", "broadcast_drafts"):
            self._shadows.place(name, partial(self._timed, name))

    def deactivate(self, reason: str) -> None:
        """Give the handler its own methods back."""
        self.active = False
        self._shadows.remove()

    def _timed(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        recording = Recording(stock, self.handler.broadcast_group)  # what really goes out: not every step needs it

        def issue(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return stock(*args, **kwargs)
            start = self.timer.start(self.handler.main_stream) if self.timer else None
            answer = recording.run(args, kwargs)
            issued = len(recording.calls)
            self.issued[name] += issued > 0
            self.issued["collectives"] += issued
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
            "collectives": self.issued["collectives"],
            "residency": self.timer.summary() if self.timer else None,
        }
