"""How a step grows with ranks: the line through what was measured, and the table."""

import json

import pytest
from click.testing import CliRunner

from hosts.growth import command, growth, line


def test_the_line_goes_through_what_lies_on_one():
    """Two points or more."""
    assert line({4: 10.0, 8: 18.0}, 64) == pytest.approx(130.0)
    assert line({2: 6.0, 4: 10.0, 8: 18.0}, 16) == pytest.approx(34.0)


def test_rows_are_what_was_measured_and_one_more():
    """The ratio is of rates; beyond compute is by stage."""
    rows = growth({"flush": {4: 10.0, 8: 18.0}, "patched": {4: 10.0, 8: 20.0}}, 16, 2.0)
    assert rows == [
        ("flush", "4", "10.00", "1.000", "0.50"),
        ("flush", "8", "18.00", "1.000", "0.25"),
        ("flush", "16, on paper", "34.00", "1.000", "0.12"),
        ("patched", "4", "10.00", "1.000", "0.50"),
        ("patched", "8", "20.00", "0.900", "0.50"),
        ("patched", "16, on paper", "40.00", "0.850", "0.50"),
    ]


def test_results_of_the_bench_are_read(tmp_path):
    """By the medians of the runs; one number of ranks alone is refused."""
    for pp, rates in ((4, [100.0, 90.0, 110.0]), (8, [50.0, 40.0, 60.0])):
        row = {"scenario": "steady", "policy": "patched", "pp": pp, "raw": [{"tokens_per_s": rate} for rate in rates]}
        written = {"environment": {"mpi": "some", "ranks": "0 on a"}, "rows": [row, {**row, "scenario": "late"}]}
        (tmp_path / f"{pp}.json").write_text(json.dumps(written))
    files = [str(tmp_path / "4.json"), str(tmp_path / "8.json")]
    done = CliRunner().invoke(command, files)
    assert done.exit_code == 0, done.output
    assert "# mpi some\n" in done.output
    assert [text.split() for text in done.output.splitlines()[2:]] == [
        ["patched", "4", "10.00", "-", "0.50"],
        ["patched", "8", "20.00", "-", "0.50"],
        ["patched", "64,", "on", "paper", "160.00", "-", "0.50"],
    ]
    assert "two numbers of ranks" in CliRunner().invoke(command, files[:1]).output
