"""How every measurement here is shown and written: one kind of table, one kind of JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "described", "table", "write"]

SCHEMA = 1  # changes when a key changes its meaning


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], units: Sequence[str] = (), left: int = 1) -> str:
    """Return lines of equal length: names, `units` if any, then the rows; the first `left` columns are left-aligned."""
    lines = [columns, *([units] if units else []), *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    align = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return "\n".join("  ".join(put(*cell) for put, *cell in zip(align, line, widths, strict=True)) for line in lines)


def described(environment: Mapping[str, Any]) -> str:
    """Return the line above every table that says what was measured on."""
    return "# " + ", ".join(f"{key} {value}" for key, value in environment.items())


def write(path: Path, **fields: Any) -> None:
    """Write a result as JSON: the schema number, then the fields as they are given."""
    path.write_text(json.dumps({"schema": SCHEMA, **fields}) + "\n", encoding="utf-8")
