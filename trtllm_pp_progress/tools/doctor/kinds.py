"""What a finding is: a kind with its texts, and one of that kind, made from the facts of a report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["SEVERITIES", "Finding", "Kind", "kinds_of", "rows"]

SEVERITIES = ("error", "warning", "info")  # the worst first


@dataclass(frozen=True)
class Finding:
    """Something worth knowing of this environment."""

    kind: Kind
    severity: str
    means: str
    do: str

    def written(self) -> dict[str, str]:
        """Return it as a report has it."""
        return {"id": self.kind.id, "severity": self.severity, "means": self.means, "do": self.do}


@dataclass(frozen=True)
class Kind:
    """A kind of finding: in which environment it is made, what it means and what to do, as templates.

    `doubt`: a worker may not start here, or not as the doctor's child did, so that nothing is called fine or cured.
    """

    id: str
    severity: str
    environment: str
    means: str
    do: str
    doubt: bool = False

    def found(self, *, severity: str | None = None, do: str | None = None, **words: Any) -> Finding:
        """Make one, with the words that its texts need."""
        return Finding(self, severity or self.severity, self.means.format(**words), (do or self.do).format(**words))


def kinds_of(*modules: ModuleType) -> list[Kind]:
    """Return the kinds that modules define, in their order."""
    return [value for module in modules for value in vars(module).values() if isinstance(value, Kind)]


def rows(kinds: list[Kind]) -> str:
    """Return a table of kinds in Markdown, as docs/doctor.md has it."""

    def cell(text: str) -> str:
        return re.sub(r"\{(\w+)[^}]*\}", r"*\1*", text).replace("|", "\\|")

    lines = ["| environment | finding | what we say | what to do |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {cell(kind.environment)} | `{kind.id}`, {kind.severity} | {cell(kind.means)} | {cell(kind.do)} |"
        for kind in kinds
    ]
    return "\n".join(lines)
