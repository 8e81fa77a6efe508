"""What a handler's method broadcasts: the method runs, and its collectives are kept back or only counted.

Nothing of vLLM is copied: masks, snapshots and buffers of the step are made by its own code. Works for every release
whose handler issues plain broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch.distributed

__all__ = ["Call", "Recording"]

Call = Callable[[], Any]

_dist = torch.distributed
_replacing = Lock()  # torch's broadcast: whoever replaces it puts back what was there


class Recording:
    """Runs a method and records, in order, what it broadcasts on `group`; other groups' broadcasts pass.

    With `first` the broadcasts are kept back, and it is called when the first one is, where the handler is on the
    stream that it issues them on; without it they go out. torch's function is replaced while the method runs, which is
    host code of microseconds, and nothing in there waits for a peer. Which thread issues a broadcast does not matter:
    two threads cannot use one group without an order between them.
    """

    def __init__(self, method: Callable[..., Any], group: Any, first: Callable[[], None] | None = None) -> None:
        self._method = method
        self.calls: list[Call] = []  # of the last run, also where it raised
        self._torchs: Any = None

        # Named as torch names them: a keyword that is a parameter costs no dictionary.
        def broadcast(tensor: Any, src: Any = None, group: Any = None, *rest: Any, **options: Any) -> Any:
            torchs, calls = self._torchs, self.calls
            if group is not ours:
                return torchs(tensor, src, group, *rest, **options)
            if first is None:
                answer = torchs(tensor, src, group, *rest, **options)
                calls.append(torchs)
                return answer
            if not calls:
                first()
            if rest or options:
                calls.append(partial(torchs, tensor, src, group, *rest, **options))
            else:
                calls.append(partial(torchs, tensor, src, group))
            return None

        ours = group
        self._broadcast = broadcast

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method; what it raises comes through."""
        with _replacing:
            self.calls, self._torchs = [], _dist.broadcast
            _dist.broadcast = self._broadcast
            try:
                return self._method(*args, **kwargs)
            finally:
                _dist.broadcast = self._torchs
