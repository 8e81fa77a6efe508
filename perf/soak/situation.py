"""What a life is like: drawn from a seed and the life's number, so that every rank draws the same, again and again."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["ENDS", "ERAS", "LEAVES", "Situation", "draw", "leave_of"]

ERAS = ("B/D", "C", "E1", "E2", "F", "G", "H", "F-async", "G-async", "H-async")
ENDS = ("shutdown", "shutdown in a thread", "collected", "uninstalled")
PAYLOADS = (1, 4096, 1 << 16, 300_000, 1_000_000)
DEADLINES_S = (0.0, 0.02, 0.2, 5.0)
LEAVES = ("return", "exit", "signal", "finalize")  # of a process, after its last life


@dataclass(frozen=True)
class Situation:
    """One life. `late_s` is the longest pause before a receive, `held_s` how long the last rank's GIL is held at times.

    With `withheld` the last sample state is received only once its receiver has shut down, `withheld_s` later: by then
    the sender may have given it up, and ended.
    """

    era: str
    payload_bytes: int
    steps: int
    concurrency: int
    deadline_s: float
    late_s: float
    held_s: float
    withheld: bool
    withheld_s: float
    end: str


def draw(seed: int, number: int) -> Situation:
    """Return the situation of a life."""
    dice = random.Random(f"{seed} {number}")
    withheld = dice.random() < 0.3
    return Situation(
        era=dice.choice(ERAS),
        payload_bytes=dice.choice(PAYLOADS),
        steps=dice.randint(1, 5),
        concurrency=dice.randint(1, 3),
        deadline_s=dice.choice(DEADLINES_S),
        late_s=dice.choice((0.0, 0.0, 0.002, 0.01)),
        held_s=dice.choice((0.0, 0.0, 0.005, 0.02)),
        withheld=withheld,
        withheld_s=dice.choice((0.0, 0.01, 0.05, 0.3)),
        end=dice.choice(ENDS[:-1] if withheld else ENDS),  # upstream's own wait for it would have no end
    )


def leave_of(seed: int) -> str:
    """Return how the processes of a seed end."""
    return random.Random(f"{seed} leaves").choice(LEAVES)
