"""How long sends took, in fixed buckets, so that the quantiles of any window can be told from two readings."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["Histogram", "quantile", "since"]

PARTS = 8  # of each doubling: a quantile is right to 9 %


class Histogram(dict[int, int]):
    """Counts by bucket, eight to each doubling of a time in microseconds, evenly spaced; 0 has what is below one."""

    def count(self, seconds: float) -> None:
        """Count one time."""
        mantissa, doublings = math.frexp(seconds * 1e6)  # 0.5 <= mantissa < 1: cheaper than a logarithm
        bucket = max(0, (doublings - 1) * PARTS + int((2 * mantissa - 1) * PARTS)) if seconds > 0 else 0
        self[bucket] = self.get(bucket, 0) + 1


def since(now: Mapping[int, int], before: Mapping[int, int]) -> dict[int, int]:
    """Return what was counted between two readings."""
    return {bucket: count - before.get(bucket, 0) for bucket, count in now.items() if count > before.get(bucket, 0)}


def quantile(counts: Mapping[int, int], share: float) -> float:
    """Return the time in seconds that a share of the counted stays below, by the middle of its bucket; 0 for none."""
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return float(2 ** (bucket // PARTS) * (1 + (bucket % PARTS + 0.5) / PARTS) * 1e-6)
    return 0.0
