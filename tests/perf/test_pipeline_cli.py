"""perf/pipeline.py's command line: bad input is one line on stderr and exit code 2, before a model is read."""

import subprocess
import sys
from pathlib import Path

import pytest

PIPELINE = Path(__file__).resolve().parents[2] / "perf" / "pipeline.py"


@pytest.mark.parametrize(
    ("option", "bad", "said"),
    [
        ("--reentry-ms", "nan", "--reentry-ms"),
        ("--timeout", "nan", "--timeout"),
        ("--timeout", "inf", "--timeout"),
        ("--policies", "flush,patched", "--expect-recovery needs the policies regressed, flush and patched"),
        ("--payload", "lots", "unknown payload 'lots': valid are none, logits, or a size in bytes from "),
        ("--payload", "-1", "unknown payload '-1'"),
        ("--payload", "1.5", "unknown payload '1.5'"),
        ("--payload", "", "unknown payload ''"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(option, bad, said):
    """The value and the valid ones are named; a model that is nowhere is not even looked for."""
    line = [sys.executable, PIPELINE, "--model", "/nowhere", "--expect-recovery", option, bad]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr
