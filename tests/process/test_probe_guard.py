"""The probe's watchdog: whatever becomes of the rank, its exit code is one of three and names the step."""

import subprocess
import sys
import textwrap
import time

import pytest

CHILD = """
    import ctypes, os, signal, sys, time
    from trtllm_pp_progress.tools.probe.watchdog import guard
    step = guard(LIMIT, lambda problem: print("complaint:", problem, flush=True))
    step("first")
    step("second step", SECOND)
    {then}
"""


def guarded(then, limit=30.0, second=30.0):
    """Run a guarded program and return its exit code, output and seconds."""
    code = textwrap.dedent(CHILD).format(then=then).replace("LIMIT", str(limit)).replace("SECOND", str(second))
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )
    return done.returncode, done.stdout, time.monotonic() - started


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_rank_that_ends_is_passed_on(code):
    """Its exit code is the program's, and nothing is complained about."""
    assert guarded(f"step.done({code}); sys.exit({code})")[:2] == (code, "")


@pytest.mark.parametrize(
    "then",
    [
        "time.sleep(600)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "ctypes.PyDLL(None).sleep(600)",
        "os.read(os.pipe()[0], 1)",
    ],
    ids=["asleep", "stopped", "GIL held", "blocked"],
)
def test_a_rank_that_is_stuck_is_ended_at_the_limit(then):
    """The step is named; a held GIL or a stopped process cannot keep the watchdog from it."""
    code, out, took = guarded(then, second=0.5)
    assert (code, out) == (2, "complaint: it did not get through 'second step' within 0.5 s\n")
    assert took < 30


def test_a_rank_that_is_killed_is_not_taken_for_a_verdict():
    """A signal has no exit code of its own."""
    code, out, _ = guarded("os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, out) == (2, "complaint: it was ended by SIGKILL in 'second step'\n")


@pytest.mark.parametrize(
    ("then", "exited"), [("sys.exit(77)", 77), ("1 / 0", 1), ("sys.exit(0)", 0), ("step.done(0); sys.exit(1)", 1)]
)
def test_an_exit_code_that_was_not_announced_is_no_verdict(then, exited):
    """MPI has its own on an error, and that of a traceback is 1."""
    code, out, _ = guarded(then)
    assert code == 2
    assert out.startswith("complaint: it failed in '")
    assert out.endswith(f"with exit code {exited}\n")


def test_a_new_step_starts_the_clock_anew():
    """Steps that take long together, each within its limit, are fine."""
    code, out, _ = guarded(
        "[(time.sleep(0.2), step(str(i), 5)) for i in range(5)]; step.done(1); sys.exit(1)", limit=5, second=5
    )
    assert (code, out) == (1, "")


def test_a_rank_dies_with_its_watchdog():
    """Who kills what the launcher knows of leaves nothing behind."""
    code = textwrap.dedent(CHILD).format(then="print(os.getpid(), flush=True); time.sleep(600)")
    code = code.replace("LIMIT", "600").replace("SECOND", "600")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.kill()
    process.wait(10)
    assert process.stdout.read() == "", "the pipe is open until the child is gone"
    process.stdout.close()
    assert child > 0
