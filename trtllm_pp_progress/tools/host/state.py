"""What the executor and its stages pass around."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["BatchStatePP", "Request", "SampleState", "Sampled", "Scheduled", "Stage", "Transfer"]


@dataclass
class Request:
    """One request, known to every rank.

    `tokens` are those generated and handled so far; only on rank 0 are they sure to be complete when the request is
    scheduled. `computed` is how many positions this rank's stage has run, the same on every rank.
    """

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def finished(self) -> bool:
        """Whether all its tokens are there."""
        return len(self.tokens) >= self.max_tokens


@dataclass
class Sampled:
    """The sample state on the host, which travels the ring: a token for each request of the batch, in its order.

    `payload` stands for what makes upstream's message large (logits, log-probs). `posted` is the sender's monotonic
    clock just before isend, in seconds.
    """

    new_tokens: list[int]
    payload: Any = b""
    step: int = 0
    posted: float = 0.0


class Transfer(NamedTuple):
    """One sample state received: posted by the sender's clock; the receive begun and complete by the receiver's."""

    posted: float
    ready: float
    received: float

    def parked_s(self, here: Callable[[float], float] = float) -> float:
        """Return the seconds from both sides posted to complete; `here` makes the sender's moments the receiver's."""
        return self.received - min(max(self.ready, here(self.posted)), self.received)


@dataclass
class SampleState:
    """Upstream's sample state, as far as the relay looks at it."""

    requests: list[Request]
    host: Sampled | None = None


@dataclass
class Scheduled:
    """The schedule of one iteration as it travels down the pipeline; without request ids it is the order to stop."""

    request_ids: list[int]
    new_requests: list[Request]
    last_of_queue: bool = False  # no other batch can be scheduled before this one is handled
    relays: int = 0  # batches that the executor thread of every rank relays before this one
    payload: bytes = b""  # stands for what makes upstream's schedule large


@dataclass
class BatchStatePP:
    """One executed microbatch on its way round the ring."""

    microbatch_id: int
    sample_state: SampleState


class Stage(Protocol):
    """One pipeline stage. Nothing in it enters MPI: activations travel beside it, as NCCL's do upstream."""

    def receive(self, timeout: float | None) -> bool:
        """Wait outside MPI for the next activation, at most `timeout` seconds; rank 0 never waits."""

    def forward(self, requests: Sequence[Request]) -> Sampled | None:
        """Run a batch and send the activation on, or sample on the last rank; an empty batch is passed on as such."""

    def taken(self, timeout: float | None) -> bool:
        """Wait outside MPI until the next rank takes the activation, at most `timeout` seconds, where that matters."""

    def check(self, host: Sampled) -> int:
        """Return how many payloads of a received sample state are wrong."""

    def release(self, request: Request) -> None:
        """Free what is kept for a finished request."""

    def close(self) -> None:
        """Give up the connection; nothing is sent afterwards."""
