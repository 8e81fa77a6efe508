"""A part of the fault matrix (`python perf faults`), on two hosts: nothing wrong, no end that the patch takes away."""

import json
import subprocess
import sys

import pytest
from jobs import ROOT, no_rank

from hosts import faults

pytestmark = pytest.mark.usefixtures("possible")


def cell(outcome, wrong=0, **said):
    """Return what became of a cell."""
    return {"outcome": outcome, "seconds": 4.2, "wrong": wrong, "said": said}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["loss-1", "cut-1", "stopped-end", "killed"])
def test_what_ends_without_the_patch_ends_with_it(fault, tmp_path):
    """And nothing is wrong: exit code 0, a line of the table, and a file with every cell."""
    path = tmp_path / "faults.json"
    line = [sys.executable, ROOT / "perf", "faults", "--faults", fault, "--relays", "E", "--json", path]
    done = subprocess.run(line, env=no_rank(), capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert faults.FAULTS[fault].meaning in done.stdout
    cells = json.loads(path.read_text())["cells"][fault]
    assert list(cells) == ["E", "E, patched"]
    due = {"aborted"} if fault == "killed" else {"ended"}
    assert {found["outcome"] for found in cells.values()} == due, done.stdout + str(cells)
    assert all(found["wrong"] == 0 for found in cells.values())
    if fault != "killed":
        assert [found["ranks"] for found in cells.values()] == [4, 4]


@pytest.mark.parametrize(
    ("plain", "patched", "said"),
    [
        (cell("ended"), cell("ended"), []),
        (cell("hung"), cell("aborted"), []),
        (cell("aborted"), cell("hung"), ["cut, E, patched: hung, without the patch aborted"]),
        (cell("ended"), cell("aborted"), ["cut, E, patched: aborted, without the patch ended"]),
        (cell("ended"), cell("ended", wrong=2), ["cut, E, patched: 2 wrong payloads"]),
        (cell("hung", wrong=1), cell("ended"), ["cut, E: 1 wrong payloads"]),
    ],
)
def test_a_worse_end_and_a_wrong_payload_fail(plain, patched, said):
    """Control: each is named."""
    assert faults.judge({"cut": {"E": plain, "E, patched": patched}}) == said
