"""Every policy in turn, round after round, so that all of them meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from case.evidence import summarise

__all__ = ["Rows", "Tokens", "rounds", "run_all"]

Rows = dict[str, list[dict[str, Any]]]
Tokens = dict[str, list[list[list[int]]]]


def rounds(comm: Any, policies: list[str], repeat: int, seconds: float | None) -> Iterator[list[str]]:
    """Yield the policies in the order of each round; every other one backwards, so that no drift favours anybody.

    With `seconds` no round begins that would end later, if it took as long as the longest so far.
    """
    began, longest = time.monotonic(), 0.0
    for number in range(repeat):
        started = time.monotonic()
        enough = seconds is None or started - began + longest <= seconds
        if not comm.bcast(enough):
            return
        yield policies if number % 2 == 0 else policies[::-1]
        longest = max(longest, time.monotonic() - started)


def run_all(run_once: Callable[..., Any], each: Iterable[list[str]], say: Callable[[str], Any]) -> tuple[Rows, Tokens]:
    """Run each policy once a round; figures and tokens are rank 0's."""
    rows: Rows = {}
    tokens: Tokens = {}
    for number, policies in enumerate(each, 1):
        for policy in policies:
            if (outcome := run_once(policy=policy)) is not None:
                rows.setdefault(policy, []).append(summarise(outcome))
                tokens.setdefault(policy, []).append(outcome.tokens)
                say(f"{number} {policy}: {outcome.tokens_per_s:.2f} tokens/s")
    return rows, tokens
