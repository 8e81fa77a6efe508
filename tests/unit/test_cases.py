"""CASES.md: no report is missing, every test that it names is there, every sentence of a document stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEVER_GIVEN = {3, 14, 21, 31, 43, 50, 56, 57}
LAST, NAMED_FROM = 96, 59
LINES = {
    int(number): cell
    for number, cell in re.findall(
        r"^\| (\d+) \| [^|]+ \| (.+) \|$", (ROOT / "tests" / "CASES.md").read_text(), re.MULTILINE
    )
}


def test_there_is_a_line_for_each():
    """Nothing was left out, and nothing has two."""
    assert set(LINES) == set(range(1, LAST + 1)) - NEVER_GIVEN
    text = (ROOT / "tests" / "CASES.md").read_text()
    assert len(re.findall(r"^\| \d+ \|", text, re.MULTILINE)) == len(LINES)


@pytest.mark.parametrize("number", sorted(LINES))
def test_what_a_line_names_is_there(number):
    """A test in its file, by its number from 59 on; or a sentence in its document."""
    cell = LINES[number]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
    sentences = re.findall(r"`(docs/[\w-]+\.md)`: \"([^\"]+)\"", cell)
    for path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text()
        assert number < NAMED_FROM or str(number) in re.findall(r"\d+", name)
    for path, sentence in sentences:
        assert sentence in " ".join((ROOT / path).read_text().split())
    assert tests or sentences
