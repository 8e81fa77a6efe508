"""When to post a receive: the whole rule, without vLLM, torch or a clock.

Words, all counted in engine steps (an empty step counts too):
- A receive belongs to the step T that saved it and is consumed at the start of step T + depth (depth = pp_size).
- Its *age* at step S is S - T. It is *due* once its age reaches the delay, at the placement's point of the step: before
  the model (the start of the step) or after it (the model's work and the activation send are queued by then).
- A step without a model run never reaches the point after the model; what was due there is *caught up* with at the
  start of the next step.

Collectives match by order alone, so whatever posts a receive posts every older one first, and nothing is consumed
unposted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["POST_MODEL", "PRE_MODEL", "Deferral", "Receive", "State", "Tally", "delay_for"]

P = TypeVar("P")

PRE_MODEL, POST_MODEL = "pre-model", "post-model"


class State(Enum):
    """How far a step's receive has come; a step that receives nothing has no receive (ABSENT is None)."""

    SAVED = "saved"
    POSTED = "posted"
    CONSUMED = "consumed"


SAVED, POSTED, CONSUMED = State  # an enumeration's attribute is slow to look up


@dataclass
class Tally:
    """What was posted when; one for the life of a handler, while deferrals come and go with warm-ups."""

    posts: Counter[str] = field(default_factory=Counter)  # by why it was posted then
    ages: Counter[int] = field(default_factory=Counter)  # by age at posting, in steps


@dataclass(eq=False)
class Receive(Generic[P]):
    """One step's receive: `payload` is what posting it takes, frozen when it was saved."""

    payload: P
    step: int
    state: State = SAVED


def delay_for(rank: int, depth: int) -> int:
    """Return the rank-aware delay: the step in whose course the last rank has this rank's result ready.

    In a balanced pipe rank r runs step T one slot after rank r - 1, so step T leaves the last rank depth - 1 - r slots
    after it left rank r. Always from 1 to depth - 1 on a rank that receives.
    """
    return depth - 1 - rank


class Deferral(Generic[P]):
    """A pipeline rank's receives in flight, oldest first: mirrors the handler's own queue slot by slot.

    `post` posts one payload; it is called in the order of the steps, once for each saved receive, by the thread that
    calls the methods below. The first receive is posted at once: it creates the communicator where no warm-up did, and
    it is the one on which the adapter finds out whether it understands the handler, with nothing older at stake.
    """

    def __init__(
        self, depth: int, delay: int, placement: str, post: Callable[[P], None], tally: Tally | None = None
    ) -> None:
        if not 0 < delay < depth or placement not in (PRE_MODEL, POST_MODEL):
            valid = f"0 < delay < {depth}, {PRE_MODEL} or {POST_MODEL}"
            raise ValueError(f"delay={delay}, placement={placement!r} are not valid: {valid}")
        self.delay = delay
        self.placement = placement
        self.step = 0
        self.slots: deque[Receive[P] | None] = deque([None] * depth)
        self.tally = tally or Tally()
        self._saved: deque[Receive[P]] = deque()  # of the slots, those still to be posted
        self._post = post
        self._primed = False

    def begin_step(self) -> Receive[P] | None:
        """Start the next step: post what is due or was missed, then hand out the receive that this step consumes."""
        self.step += 1
        if self.placement == PRE_MODEL:
            self._post_aged(self.delay, "due")
        else:
            self._post_aged(self.delay + 1, "catch_up")
        consumed = self.slots[0]
        if consumed is not None:
            self.post_through(consumed, "fallback")
            consumed.state = CONSUMED
        self.slots.popleft()
        self.slots.append(None)
        return consumed

    def after_model(self) -> None:
        """Mark that this step's model work is queued: post what is due after it."""
        if self.placement == POST_MODEL:
            self._post_aged(self.delay, "due")

    def save(self, payload: P) -> Receive[P]:
        """Keep this step's receive for later."""
        if self.slots[-1] is not None:  # a second receive in one step: the handler forgets the first, its peers do not
            self.flush("overwritten")
        receive = self.slots[-1] = Receive(payload, self.step)
        self._saved.append(receive)
        if not self._primed:
            self._primed = True
            self.post_through(receive, "prime")
        return receive

    def flush(self, reason: str) -> int:
        """Post everything that is saved; return how many that were."""
        return self._post_aged(0, f"flush_{reason}")

    def post_through(self, receive: Receive[P], reason: str) -> None:
        """Post `receive` if it still is to be, every older one first."""
        while receive.state is SAVED:
            self._post_oldest(reason)

    def _post_aged(self, age: int, reason: str) -> int:
        posted = 0
        while self._saved and self.step - self._saved[0].step >= age:
            self._post_oldest(reason)
            posted += 1
        return posted

    def _post_oldest(self, reason: str) -> None:
        # Taken off first: if posting raises, the collective may be half on its way and must not go out twice.
        receive = self._saved.popleft()
        receive.state = POSTED
        self.tally.posts[reason] += 1
        self.tally.ages[self.step - receive.step] += 1
        self._post(receive.payload)
