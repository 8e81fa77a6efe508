"""The host executor's stage with a real model in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from decoder import payload as payloads
from decoder.convert import prepare
from decoder.layers import Chunk, StageModel
from decoder.spec import Spec, cut
from decoder.wire import Wire

if TYPE_CHECKING:
    from trtllm_pp_progress.tools.host import Request, Sampled

__all__ = ["DecoderStage", "build"]


class DecoderStage:
    """One pipeline stage of a decoder (see `trtllm_pp_progress.tools.host.Stage`); the last one samples greedily.

    A request of which nothing is computed is a prompt to run whole; else it continues from its last token. Batches are
    checked in the order they were sampled in. `make_host` builds what travels the ring.
    """

    def __init__(self, model: StageModel, wire: Wire, payload: str | int, make_host: Callable[..., Any]) -> None:
        self.model = model
        self._wire, self._payload, self._make_host = wire, payloads.parse(payload), make_host
        self._rows: torch.Tensor | None = None
        self._sampled = 0
        self._checked = 0

    def receive(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the next activation, outside MPI; the first stage never waits.

        Raises WireError when the previous stage has closed or died.
        """
        if self.model.first or self._rows is not None:
            return True
        self._rows = self._wire.receive(timeout)
        return self._rows is not None

    def forward(self, requests: Sequence[Request]) -> Sampled | None:
        """Run one batch and send the rows on, or sample; an empty batch is passed on as no rows, and not sampled.

        Returns a Sampled on the last stage, else None. ValueError if the activation is not of this batch.
        """
        rows, self._rows = self._rows, None
        chunks = [_chunk(request) for request in requests]
        total = sum(len(chunk.ids) for chunk in chunks)
        arrived = 0 if rows is None else len(rows)
        if not self.model.first and arrived != total:
            raise ValueError(f"a batch of {total} rows got an activation of {arrived}")
        if not chunks:
            if not self.model.last:
                self._wire.send(torch.empty(0, self.model.hidden))
            return None
        output = self.model.run(chunks, rows)
        if not self.model.last:
            self._wire.send(output)
            return None
        tokens = output.argmax(dim=-1).tolist()
        step, self._sampled = self._sampled, self._sampled + 1
        data = payloads.pack(self._payload, tokens, output.cpu().numpy(), step)
        host: Sampled = self._make_host(tokens, data, step)
        return host

    def taken(self, timeout: float | None) -> bool:
        """Return at once: the wire takes an activation whether or not the next stage is there."""
        return True

    def check(self, host: Sampled) -> int:
        """Return 1 if the sample state is not the one due, or its payload not that of its tokens; else 0."""
        due, self._checked = self._checked, self._checked + 1
        return int(host.step != due or payloads.wrong(host.payload, host.new_tokens, host.step))

    def release(self, request: Request) -> None:
        """Free a finished request's cache."""
        self.model.release(request.request_id)

    def close(self) -> None:
        """End the connection with both neighbours; safe to call twice."""
        self._wire.close()


def build(
    model: str | Spec | StageModel,
    rank: int,
    size: int,
    address: str = "",
    *,
    here: str = "127.0.0.1",
    payload: str | int = payloads.NONE,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int = 1,
    make_host: Callable[..., Any] | None = None,
) -> DecoderStage:
    """Build stage `rank` of `size` of a model, holding only its own weights, and connect it with its neighbours.

    A name or a Spec is read as `dtype` onto `device`; a StageModel is taken as it is, so that weights which were read
    once serve one pipeline after the other.
    `address` is that of the pipeline's Rendezvous, the same on all ranks (not needed for one stage), `here` the one at
    which its neighbours reach this rank; the call is collective. `threads` is torch's number for this process: one a
    rank, as ranks share the cores. Raises ModelError, WireError, ValueError (payload).
    """
    payloads.parse(payload)  # before the weights are read
    torch.set_num_threads(threads)
    if not isinstance(model, StageModel):
        spec = model if isinstance(model, Spec) else prepare(model)
        cut(spec, size)
        model = StageModel(spec, rank, size, device=device, dtype=dtype)
    if make_host is None:
        from trtllm_pp_progress.tools.host import Sampled  # starts MPI, which a pipeline without it never needs

        make_host = Sampled
    wire = Wire(rank, size, address, model.hidden, model.dtype, here)
    return DecoderStage(model, wire, payload, make_host)


def _chunk(request: Request) -> Chunk:
    if request.computed:
        # Only the first stage reads ids, and only there is the last token sure to have been handled already.
        return Chunk(request.request_id, request.tokens[-1:] or [0], request.computed)
    if not request.prompt:
        raise ValueError(f"request {request.request_id} has an empty prompt")
    return Chunk(request.request_id, request.prompt, 0)
