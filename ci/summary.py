"""Sum up a run of ci/test.sh: each step's time and tests, what failed, what was skipped and why, and the sum.

Usage: ci/summary.py RESULTS. In that folder `steps` has a line a step, `slug seconds exit-code name`, and pytest has
left SLUG.xml or, by rank, SLUG-RANK.xml or SLUG-VARIANT-RANK.xml: a test counts once, with the worst that a rank saw.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ORDER = ("skipped", "passed", "failed")  # from the least to the most that can be said of a test


@dataclass
class Step:
    """One step: what it was, how it ended, and its tests: how each ended, and why it was skipped."""

    name: str
    seconds: int
    code: int
    tests: dict[str, tuple[str, str]]

    @property
    def failures(self) -> list[str]:
        """Name what failed; a step that ended badly without a failed test is a failure itself."""
        failed = [test for test, (outcome, _) in self.tests.items() if outcome == "failed"]
        return failed or ([f"{self.name}: exit code {self.code}"] if self.code else [])

    def count(self, outcome: str) -> int:
        """Return how many tests ended so."""
        return sum(found == outcome for found, _ in self.tests.values())


def outcome_of(case: ElementTree.Element) -> tuple[str, str]:
    """Return how a test ended, and why where it was skipped."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    return ("passed", "") if skipped is None else ("skipped", skipped.get("message", ""))


def tests_of(folder: Path, slug: str) -> dict[str, tuple[str, str]]:
    """Return the tests of a step; a file that a killed session left unfinished has none."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob(f"{slug}*.xml")):
        named = re.fullmatch(rf"{re.escape(slug)}(?P<variant>(-\w+)*?)(-\d*)?", path.stem)
        try:
            cases = ElementTree.parse(path).iter("testcase") if named else ()
        except ElementTree.ParseError:
            continue
        for case in cases:
            name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}{named['variant']}"
            both = [found[name], outcome_of(case)] if name in found else [outcome_of(case)]
            found[name] = max(both, key=lambda one: ORDER.index(one[0]))
    return found


def read(folder: Path) -> list[Step]:
    """Return the steps in the order they ended."""
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    steps = []
    for slug, seconds, code, name in (line.split(maxsplit=3) for line in lines):
        steps.append(Step(name, int(seconds), int(code), tests_of(folder, slug)))
    return steps


def report(steps: list[Step]) -> list[str]:
    """Return the lines to print; the last one is the sum."""
    lines = []
    for step in steps:
        counts = [f"{step.count(outcome)} {outcome}" for outcome in reversed(ORDER) if step.count(outcome)]
        counts += [f"exit code {step.code}"] if step.code else []
        lines.append(f"{step.seconds:5} s  {step.name}: {', '.join(counts) or 'passed'}")
    reasons = Counter(why for step in steps for outcome, why in step.tests.values() if outcome == "skipped")
    lines += [f"skipped {count}: {why}" for why, count in reasons.most_common()]
    failures = [failure for step in steps for failure in step.failures]
    lines += [f"FAILED {failure}" for failure in failures]
    passed, skipped = (sum(step.count(outcome) for step in steps) for outcome in ("passed", "skipped"))
    return [*lines, f"{passed} passed, {len(failures)} failed, {skipped} skipped"]


if __name__ == "__main__":
    print("\n".join(report(read(Path(sys.argv[1])))))
