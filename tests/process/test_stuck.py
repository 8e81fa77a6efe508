"""A test that never returns keeps nobody: no end of an interpreter, no uninstall, no shutdown, no look at a status."""

import subprocess
import sys
from pathlib import Path

import pytest
from standin import environment

SCRIPT = Path(__file__).parent / "stuck_script.py"
SUPPORT = Path(__file__).parents[1] / "support"
LIMIT_S = 40.0  # only a hang meets it
HANG_S = 8.0  # for what must hang


def end(way, who, limit_s=LIMIT_S):
    """Run the script to its end and return its exit code and output; raises TimeoutExpired."""
    line = [sys.executable, SCRIPT, way, who]
    done = subprocess.run(line, env=environment(SUPPORT), capture_output=True, text=True, timeout=limit_s, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("who", ["relay", "keeper"])
@pytest.mark.parametrize("way", ["exit", "uninstall", "status", "shutdown"])
def test_a_stuck_test_keeps_nobody(way, who):
    """Whoever waits for it waits briefly, and the exit code is the program's own."""
    code, output = end(way, who)
    assert code == 3, output
    assert "took" in output
    assert ("stuck in MPI: it is left behind" in output) == (way == "uninstall"), output


def test_whoever_waits_for_its_lock_without_an_end_hangs():
    """Control: the same end, with the lock of that test taken from an exit handler."""
    with pytest.raises(subprocess.TimeoutExpired):
        end("lock", "relay", HANG_S)
