"""When to post a receive: the whole rule, without vLLM, torch or a clock.

Words, all counted in engine steps (an empty step counts too):
- A receive belongs to the step T that saved it and is consumed at the start of step T + depth (depth = pp_size). A step
  that receives nothing has none; one that does has it saved, then posted, then consumed.
- Its *age* at step S is S - T. It is *due* once its age reaches the delay, after the model of that step (whose work and
  activation send are queued by then).
- A step without a model run never reaches that point; what was due there is *caught up* with at the start of the next
  step.

Collectives match by order alone, so whatever posts a receive posts every older one first, and nothing is consumed
unposted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

__all__ = ["Deferral", "Lost", "Saved", "Tally", "delay_for"]

UNPOSTED = "a sampled-result receive was about to be consumed but could not be posted"


class Tally:
    """How many were posted, by why and by age in steps; one for the life of a handler, through every warm-up."""

    def __init__(self, depth: int) -> None:
        self.counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (depth + 1))

    def posts(self) -> dict[str, int]:
        """Return the counts by why."""
        sums = {reason: sum(ages) for reason, ages in sorted(self.counts.copy().items())}  # others may be counting
        return {reason: count for reason, count in sums.items() if count}

    def ages(self) -> dict[int, int]:
        """Return the counts by age at posting, in steps."""
        sums = [sum(counts) for counts in zip(*self.counts.copy().values(), strict=True)]
        return {age: count for age, count in enumerate(sums) if count}


def delay_for(rank: int, depth: int) -> int:
    """Return the rank-aware delay: the step in whose course the last rank has this rank's result ready.

    In a balanced pipe rank r runs step T one slot after rank r - 1, so step T leaves the last rank depth - 1 - r slots
    after it left rank r. Always from 1 to depth - 1 on a rank that receives.
    """
    return depth - 1 - rank


class Saved:
    """A receive that is not posted: `payload` is what posting it takes. Stands in its slot for the event.

    The event that the handler recorded at T covers nothing. Waiting for it would not fail, but read an unfilled buffer;
    whoever uses this one gets the receive posted first.
    """

    __slots__ = ("payload", "post", "slot")

    def __init__(self, slot: Any, payload: Any, post: Callable[[Saved], Any]) -> None:
        self.slot = slot
        self.payload = payload
        self.post = post

    def __getattr__(self, name: str) -> Any:
        self.post(self)
        if self.slot.event is self:
            raise RuntimeError(UNPOSTED)
        return getattr(self.slot.event, name)


class Lost:
    """Stands in a slot for the event of a receive whose posting failed: half of it may be out, so it is not repeated.

    Whoever uses it gets an error: better no token than a wrong one.
    """

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(UNPOSTED)


class Deferral:
    """Says which of a handler's receives are to be posted now; each is returned until its slot has a real event.

    `queue` is the handler's own, one place for each of the last `depth` steps, oldest first: None for a step that
    receives nothing, or a slot, whose `event` is a Saved until the receive is posted. Every step asks for the one age
    that has become due since the step before; none is above depth, so what a step consumes is posted by its start at
    the latest.
    """

    def __init__(self, queue: deque[Any], delay: int, tally: Tally | None = None) -> None:
        depth = len(queue)
        if not 0 < delay < depth:
            raise ValueError(f"delay={delay} is not valid: 0 < delay < {depth}")
        self.queue = queue
        self.tally = Tally(depth) if tally is None else tally
        # Both ages are at one place in the queue: at a step's start its own place is not there yet.
        self._place, self._delay = depth - 1 - delay, delay
        self._due, self._caught_up = self.tally.counts["due"], self.tally.counts["catch_up"]

    def begin_step(self) -> Saved | None:
        """Return the receive that the step before has missed, if any.

        To be called before the handler takes the oldest slot off.
        """
        slot = self.queue[self._place]
        if slot is None or slot.event.__class__ is not Saved:
            return None
        self._caught_up[self._delay + 1] += 1
        saved: Saved = slot.event
        return saved

    def missed(self) -> bool:
        """Say whether begin_step() would return a receive; any thread may ask."""
        slot = self.queue[self._place]
        return slot is not None and slot.event.__class__ is Saved

    def after_model(self) -> Saved | None:
        """Return the receive that is due now that this step's model work is queued."""
        slot = self.queue[self._place]
        if slot is None or slot.event.__class__ is not Saved:
            return None
        self._due[self._delay] += 1
        saved: Saved = slot.event
        return saved

    def after_no_model(self) -> Saved | None:
        """Return the receive that is due at the end of a step that ran no model."""
        saved = self.after_model()
        if saved is not None:
            self._due[self._delay] -= 1
            self.tally.counts["empty"][self._delay] += 1
        return saved

    def held(self) -> list[Saved]:
        """Return everything that is saved, oldest first, and leave it so; any thread may ask."""
        return [receive for _, receive in self._saved()]

    def flush(self, reason: str, keep: int = 0) -> list[Saved]:
        """Return everything that is saved, oldest first, but for the newest `keep`."""
        saved = self._saved()
        saved = saved[: max(0, len(saved) - keep)]
        for age, _ in saved:
            self.tally.counts[reason][age] += 1
        return [receive for _, receive in saved]

    def _saved(self) -> list[tuple[int, Saved]]:
        slots = list(self.queue)  # at once: another thread may take a step meanwhile
        return [
            (age, slot.event)
            for age, slot in zip(range(len(slots) - 1, -1, -1), slots, strict=True)
            if getattr(slot, "event", None).__class__ is Saved
        ]
