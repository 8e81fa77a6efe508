"""`python perf`: every command is there and explains itself; tables and result files have one form."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import output

PERF = Path(__file__).parents[2] / "perf"


def perf(*arguments):
    """Run `python perf ARGUMENTS`."""
    line = [sys.executable, PERF, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def names():
    """Return the commands that the list has."""
    listed = perf()
    assert (listed.returncode, listed.stderr) == (0, "")
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")]


def test_every_command_is_listed_and_explains_itself():
    """Each leads to a module that has a main, and is on perf/README; one of each kind of parser answers --help."""
    found = names()
    spec = importlib.util.spec_from_file_location("perf_main", PERF / "__main__.py")
    listing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listing)
    assert found == list(listing.COMMANDS)
    page = (PERF / "README.md").read_text()
    assert [name for name in found if f"python perf {name}" not in page] == []
    for name in found:
        module, question = listing.COMMANDS[name]
        assert question
        assert (PERF / (module.replace(".", "/") + ".py")).read_text().count("def main(") == 1
    for name, option in (("sweep", "--quick"), ("receive-model", "--interference")):
        asked = perf(name, "--help")
        assert asked.returncode == 0
        assert option in asked.stdout


def test_an_unknown_command_is_one_line():
    """With the valid ones, and exit code 2."""
    asked = perf("swep")
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (2, "", 1)
    assert asked.stderr.startswith("Error: unknown command 'swep': valid ones are sweep, hop,")


@pytest.mark.parametrize("units", [(), ("", "ms")])
def test_a_table_is_aligned(units):
    """Every line is as long as the others; the first column begins left, figures end right."""
    lines = output.table(("policy", "step"), [("a", "1.000"), ("longer name", "10.000")], units).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0] == "policy         step"
    assert lines[-2:] == ["a             1.000", "longer name  10.000"]


def test_a_row_that_lacks_a_cell_is_refused():
    """Nothing slips into the wrong column."""
    with pytest.raises(ValueError, match="zip"):
        output.table(("policy", "step"), [("a",)])


def test_a_result_has_its_schema_first(tmp_path):
    """So that a reader knows what the other keys mean."""
    output.write(tmp_path / "result.json", environment={"cores": 2}, rows=[])
    written = json.loads((tmp_path / "result.json").read_text())
    assert list(written.items()) == [("schema", 1), ("environment", {"cores": 2}), ("rows", [])]
