"""What a measurement that judges ends with: passed, failed, or inconclusive, each an exit code and a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FAILED", "INCONCLUSIVE", "PASSED", "THRESHOLD", "Verdict", "of_code"]

PASSED, FAILED, INCONCLUSIVE = 0, 1, 3  # 2 is bad input
THRESHOLD = 0.83  # upstream fails below 223.19 of the good relay's 269.29 tokens/s (NVIDIA/TensorRT-LLM#14850)


@dataclass(frozen=True)
class Verdict:
    """What speaks against a run, and what keeps it from proving anything; each in one line."""

    failures: list[str] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code: what failed counts even where the rest proves nothing."""
        return FAILED if self.failures else INCONCLUSIVE if self.inconclusive else PASSED

    @property
    def word(self) -> str:
        """The same in a word."""
        return {PASSED: "passed", FAILED: "failed", INCONCLUSIVE: "inconclusive"}[self.code]

    def lines(self, passed: str) -> list[str]:
        """Return what to print; `passed` is the sentence where nothing speaks against the run."""
        said = [f"FAILED: {line}" for line in self.failures]
        said += [f"INCONCLUSIVE: {line}" for line in self.inconclusive]
        return said or [passed]


def of_code(code: int) -> Verdict:
    """Return the verdict that ranks ended with, which have said why."""
    if code == INCONCLUSIVE:
        return Verdict(inconclusive=["the ranks proved nothing: see above"])
    return Verdict(failures=[f"the ranks ended with {code}"] if code else [])
