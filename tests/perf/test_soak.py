"""The soak: a minute of it finds nothing, and what it looks for it finds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from soak import command
from soak.resources import Resources, grown, growth, look
from soak.situation import ENDS, ERAS, LEAVES, draw, leave_of

PERF = Path(__file__).parents[2] / "perf"
HAS = Resources(4, 30, 40_000)


@pytest.mark.timeout(400)
def test_a_minute_of_lives():
    """Over the real MPI: nothing hangs, is wrong, or is left behind."""
    line = [sys.executable, PERF, "soak", "--seconds", "60"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing hung, was wrong, or was left behind" in done.stdout


def lived(count, wrong=None, hung=False, per_life=(0, 0, 0)):
    """Return the record of a rank that lived so many lives; in the last one something may have been wrong."""
    lines = []
    for number in range(count):
        lines.append({"life": number, "situation": {"era": "E2"}})
        has = [base + int(more * number) for base, more in zip(HAS, per_life, strict=True)]
        lines.append({"lived": number, "wrong": [wrong] if wrong and number == count - 1 else [], "has": has})
    return lines[:-1] if hung else lines


@pytest.fixture
def soak(monkeypatch):
    """Return a function that lets a process leave records, one a rank, and end with a code; it returns the soak."""

    def process(*records, code=0, text=""):
        def launch(ranks, transport, arguments, *args, **kwargs):
            for rank, record in enumerate(records):
                Path(arguments[1], f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in record))
                Path(arguments[1], f"rank-{rank}.txt").write_text(text)
            return code

        monkeypatch.setattr(command, "launch", launch)
        soak = command.Soak(len(records), "tcp")
        soak.process(17, 60.0, 400)
        return soak

    return process


def test_lives_without_a_fault(soak):
    """Control: they are counted, once for all ranks."""
    found = soak(lived(100), lived(100))
    assert (found.lives, found.processes, found.faults, found.growth) == (100, 1, [], 0.0)


FAULTS = {
    "wrong": ({"records": (lived(7), lived(7, wrong="2 wrong payloads"))}, "rank 1: ['2 wrong payloads'] in life 6;"),
    "a hang": ({"records": (lived(7), lived(7, hung=True)), "code": 1, "text": "stack"}, "rank 1: life 6 did not end"),
    "threads": ({"records": (lived(40, per_life=(0.1, 0, 0)), lived(40))}, "rank 0: threads grew from 5"),
    "descriptors": ({"records": (lived(40, per_life=(0, 1, 0)), lived(40))}, "rank 0: descriptors grew from"),
    "memory": ({"records": (lived(40, per_life=(0, 0, 1000)), lived(40))}, "rank 0: memory_kib grew from"),
    "an exit code": ({"records": (lived(7), lived(7)), "code": 139}, "the process ended with 139;"),
    "no start": ({"records": ([], []), "code": 1}, "the process ended with 1;"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_looked_for_is_found(soak, what):
    """Control: each fault, once, with the command line that does it again."""
    given, expected = FAULTS[what]
    records = given.pop("records")
    found = soak(*records, **given)
    given["records"] = records
    (fault,) = found.faults
    assert expected in fault
    lives = max(len(record) + 1 for record in records) // 2
    assert f"again: python perf soak --ranks 2 --seed 17 --lives {lives}" in fault


def test_memory_that_grows_a_little_is_seen_over_many_lives():
    """Too little for one process to tell, and reported as KiB a life."""
    looks = [Resources(4, 30, 40_000 + 20 * number) for number in range(200)]
    assert grown(looks) == []
    assert growth(looks) == [pytest.approx(20.0, rel=0.05)]


def test_a_seed_gives_the_same_lives_again():
    """On every rank, and in every process; all that there is comes up."""
    lives = [draw(3, number) for number in range(300)]
    assert lives == [draw(3, number) for number in range(300)]
    assert lives != [draw(4, number) for number in range(300)]
    assert {life.era for life in lives} == set(ERAS)
    assert {life.end for life in lives} == set(ENDS)
    assert {leave_of(seed) for seed in range(100)} == set(LEAVES)
    assert not any(life.withheld and life.end == "uninstalled" for life in lives)


def test_a_process_is_looked_at():
    """Threads, descriptors and memory are this process's own."""
    before = look()
    with open(__file__):
        assert look().descriptors == before.descriptors + 1
    assert before.threads >= 1
    assert before.memory_kib > 1000
