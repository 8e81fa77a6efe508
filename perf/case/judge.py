"""The verdict as upstream's test means it, and first of all whether every relay gave the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from case.names import pairs
from verdict import THRESHOLD, Verdict

__all__ = [
    "CLEAR",
    "KERNEL_SPREAD",
    "against_threshold",
    "in_pairs",
    "kernel_ms",
    "no_harm",
    "token_failures",
    "without_good",
]

CLEAR = 0.95  # of the threshold, which no regressed run may exceed: else the detector cannot detect
KERNEL_SPREAD = 0.03  # the GPU's work is the same whatever the relay
NO_HARM = 0.99  # of the same relay without the patch
NOISE = 0.03  # two rates nearer than that are equal


def token_failures(
    tokens: Mapping[str, Sequence[list[list[int]]]], expected: list[list[int]], wrong: Mapping[str, int]
) -> list[str]:
    """Compare the tokens of every run: among each other in full, with the unsplit model's as far as those go."""
    failures = [f"{policy}: {count} wrong sample states" for policy, count in wrong.items() if count]
    first = next((runs[0] for runs in tokens.values() if runs), [])
    for policy, runs in tokens.items():
        for answers in runs:
            short = [answer[: len(due)] for answer, due in zip(answers, expected, strict=False)]
            if short != expected:
                failures.append(f"{policy}: tokens are not the unsplit model's")
                break
            if answers != first:
                failures.append(f"{policy}: tokens are not those of the other relays")
                break
    return failures


def against_threshold(rows: Mapping[str, Sequence[Mapping[str, Any]]], *, kernels: bool) -> Verdict:
    """Judge the runs of each policy; `rows` has at least flush, and what is missing is not judged.

    Where the regressed relay loses too little, nobody can tell a cure from none: inconclusive. `kernels`: whether
    computing times are a GPU's, which must agree.
    """
    floor = THRESHOLD * median(run["tokens_per_s"] for run in rows["flush"])
    failures, inconclusive = [], []
    if "patched" in rows and (rate := median(run["tokens_per_s"] for run in rows["patched"])) < floor:
        failures.append(f"patched is {rate:.2f} tokens/s, below the threshold of {floor:.2f} ({THRESHOLD} of flush)")
    if "regressed" in rows and (rate := max(run["tokens_per_s"] for run in rows["regressed"])) > CLEAR * floor:
        inconclusive.append(
            f"regressed is {rate:.2f} tokens/s, not clearly below the threshold of {floor:.2f} (at most "
            f"{CLEAR * floor:.2f}): this run detects nothing"
        )
    if kernels:
        times = {policy: median(kernel_ms(run) for run in runs) for policy, runs in rows.items()}
        low, high = min(times.values()), max(times.values())
        if high > low * (1 + KERNEL_SPREAD):
            failures.append(
                f"GPU time of a step differs by {high / low - 1:.1%}, more than {KERNEL_SPREAD:.0%}: "
                + ", ".join(f"{policy} {ms:.3f} ms" for policy, ms in times.items())
            )
    return Verdict(failures, inconclusive)


def in_pairs(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[float, float, float]]:
    """Return for each patched policy its rate in parts of the unpatched one's: median and quartiles of the pairs.

    A pair are the runs of one round, which met the same machine.
    """
    found = {}
    for plain, patched in pairs(rows):
        both = zip(rows[plain], rows[patched], strict=True)
        ratios = [with_patch["tokens_per_s"] / without["tokens_per_s"] for without, with_patch in both]
        low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        found[patched] = (median(ratios), low, high)
    return found


def no_harm(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Verdict:
    """Judge each pair: failed where three of four pairs are below, inconclusive where only the median is."""
    failures, inconclusive = [], []
    for patched, (middle, low, high) in in_pairs(rows).items():
        if middle < NO_HARM:
            said = f"{patched} is {middle:.3f} of the same relay without ({low:.3f} to {high:.3f}), below {NO_HARM}"
            (failures if high < NO_HARM else inconclusive).append(said)
    return Verdict(failures, inconclusive)


def without_good(regressed: float, patched: float) -> Verdict:
    """Judge two rates where no good build was measured: the patched one has to be the faster one."""
    said = f"patched is {patched:.2f} tokens/s, regressed {regressed:.2f}"
    if patched < regressed * (1 - NOISE):
        return Verdict(failures=[f"{said}: patched is the slower one"])
    if patched < regressed * (1 + NOISE):
        return Verdict(inconclusive=[f"{said}: equal within {NOISE:.0%}, so nothing parked that the patch could cure"])
    return Verdict()


def kernel_ms(run: Mapping[str, Any]) -> float:
    """Return the computing time of one step over all ranks."""
    return float(sum(run["kernel_ms"]))
