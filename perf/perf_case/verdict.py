"""Pass or fail, as upstream's test means it, and first of all whether every relay gave the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["CLEAR", "KERNEL_SPREAD", "THRESHOLD", "kernel_ms", "threshold_failures", "token_failures"]

THRESHOLD = 0.83  # upstream fails below 223.19 of the good relay's 269.29 tokens/s (NVIDIA/TensorRT-LLM#14850)
CLEAR = 0.95  # of the threshold, which no regressed run may exceed: else the detector cannot detect
KERNEL_SPREAD = 0.03  # the GPU's work is the same whatever the relay


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


def threshold_failures(rows: Mapping[str, Sequence[Mapping[str, Any]]], *, kernels: bool) -> list[str]:
    """Judge the runs of each policy; `rows` has at least flush, and what is missing is not judged.

    `kernels`: whether computing times are a GPU's, which must agree.
    """
    good = median(run["tokens_per_s"] for run in rows["flush"])
    floor = THRESHOLD * good
    failures = []
    if "patched" in rows and (rate := median(run["tokens_per_s"] for run in rows["patched"])) < floor:
        failures.append(f"patched is {rate:.2f} tokens/s, below the threshold of {floor:.2f} ({THRESHOLD} of flush)")
    if "regressed" in rows and (rate := max(run["tokens_per_s"] for run in rows["regressed"])) > CLEAR * floor:
        failures.append(
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
    return failures


def kernel_ms(run: Mapping[str, Any]) -> float:
    """Return the computing time of one step over all ranks."""
    return float(sum(run["kernel_ms"]))
