"""Issue receives that were kept back: on the handler's broadcast stream, with an event behind each."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_pp_progress.vllm.policy import Lost, Saved

__all__ = ["Posting"]


class Posting:
    """Issues a handler's saved receives, behind the model whose stream they wait for, or beside everything."""

    def __init__(self, handler: Any) -> None:
        self.collectives = 0
        self._handler = handler
        self._rides = False  # whether the handler is known to issue its broadcasts on its broadcast stream

    def ride(self, saved: Saved) -> None:
        """Post from inside the handler's own receive: on its stream, behind the model, at no extra cost."""
        if self._rides or self._on_stream():
            self._put(saved, self._handler.broadcast_stream)
        else:
            self.post([saved])

    def post(self, receives: list[Saved]) -> None:
        """Post behind the main stream's work so far, as the handler does at T."""
        if not torch.is_inference_mode_enabled():  # as a flush between steps; the buffers were made in it
            with torch.inference_mode():
                return self.post(receives)
        stream = self._handler.broadcast_stream
        with torch.cuda.stream(stream):
            stream.wait_stream(self._handler.main_stream)
            for saved in receives:
                self._put(saved, stream)

    def post_beside(self, receives: list[Saved]) -> None:
        """Post so that nothing of this rank's is waited for, however stuck it is; from any thread.

        On a stream of their own, of the highest priority. Their buffers are ready: they were made on the broadcast
        stream, and the communicator keeps its order whatever the stream. What is posted later goes behind them.
        """
        ours = self._handler.broadcast_stream
        device = getattr(ours, "device", None)
        if device is not None:
            torch.cuda.set_device(device)  # of this thread, which would else open a context on the first GPU
        with torch.inference_mode():
            make: Any = torch.cuda.Stream  # torch leaves it untyped
            beside = make(device=device, priority=-1)
            with torch.cuda.stream(beside):
                for saved in receives:
                    self._put(saved, beside)
            ours.wait_stream(beside)

    def _put(self, saved: Saved, stream: Any) -> None:
        """Issue a receive on the current stream, with an event behind it."""
        try:
            for broadcast in saved.payload:
                broadcast()
            saved.slot.event = stream.record_event()
        except Exception:
            saved.slot.event = Lost()
            raise
        self.collectives += len(saved.payload)

    def _on_stream(self) -> bool:
        """Whether the handler is on its broadcast stream where it issues its broadcasts."""
        self._rides = torch.cuda.current_stream() == self._handler.broadcast_stream
        return self._rides
