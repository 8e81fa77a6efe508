"""The sweep goes on where it stopped and plots what it has; the ladder of a hop has all its lines."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import no_rank

PERF = Path(__file__).parents[2] / "perf"


def script(name, *options):
    """Run one of perf's commands and return how it ended."""
    command = [sys.executable, PERF, name, *map(str, options)]
    return subprocess.run(command, env=no_rank(), capture_output=True, text=True, timeout=110, check=False)


def rows(path):
    """Return a CSV's rows."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_sweep_measures_what_is_not_there_yet(tmp_path):
    """A row is taken away: only that point is measured again, and nothing is wrong."""
    path, plot = tmp_path / "sweep.csv", tmp_path / "sweep.png"
    options = ["--quick", "--pp", 2, "--steps", 10, "--seconds", 0.1, "--repeat", 1, "--transports", "tcp"]
    options += ["--parts", "interval,payload", "--largest", 262145, "--csv", path, "--plot", plot]
    done = script("sweep", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    first = rows(path)
    swept = {(row["part"], row["relay"], row["interval_us"], row["payload_bytes"]) for row in first}
    assert len(swept) == len(first) == 3 + 3 * 3
    assert {row["wrong"] for row in first} == {"0"}
    assert all(float(row["tokens_per_s"]) > 0 for row in first)
    assert plot.stat().st_size > 1000
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    plot.unlink()
    done = script("sweep", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("tokens/s") == 1
    again = rows(path)
    assert again[:-1] == first[:-1]
    assert len(again) == len(first)
    assert plot.exists()


@pytest.mark.parametrize(("text", "said"), [("a,b\n", "has not the columns"), (None, "nothing has been measured")])
def test_a_plot_of_nothing_is_refused(tmp_path, text, said):
    """One line: another sweep's file, or none."""
    path = tmp_path / "sweep.csv"
    if text is not None:
        path.write_text(text)
    done = script("sweep", "--plot-only", "--csv", path, "--plot", tmp_path / "plot.png")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr
    assert not (tmp_path / "plot.png").exists()


def test_the_ladder_has_all_lines(tmp_path):
    """From two buffers to a relay's hop, and the pieces."""
    path = tmp_path / "hop.json"
    done = script("hop", "--rounds", 10, "--payload", 20000, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text(encoding="utf-8"))
    assert list(written["lines_ms"]) == [
        "buffers, hot",
        "pkl5, hot",
        "pkl5, after a pause",
        "by a relay thread",
        "and the executor is woken first",
        "flush relay",
    ]
    assert all(0 < p50 <= p99 for p50, p99 in written["lines_ms"].values())
    assert set(written["pieces_us"]) == {"pickle", "unpickle", "probe", "thread wake-up", "test of a pending send"}
    assert all(value > 0 for value in written["pieces_us"].values())
    assert "what would close it" in done.stdout
