"""Keep the broadcasts of a piece of code back, and pass everybody else's on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed

__all__ = ["Call", "Recorder"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_recording = threading.Lock()


class Recorder:
    """While entered, keeps back the broadcasts that this thread issues on one group; all others pass.

    torch's function is replaced for that time, which is host code of microseconds. A lock keeps two recorders from
    putting back each other's replacement.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __enter__(self) -> list[Call]:
        _recording.acquire()
        self._thread = threading.get_ident()
        self._calls: list[Call] = []
        self._stock = torch.distributed.broadcast
        torch.distributed.broadcast = self
        return self._calls

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        torch.distributed.broadcast = self._stock
        _recording.release()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = kwargs["group"] if "group" in kwargs else args[2] if len(args) > 2 else None
        if group is not self._group or threading.get_ident() != self._thread:
            return self._stock(*args, **kwargs)
        self._calls.append((self._stock, args, kwargs))
        return None
