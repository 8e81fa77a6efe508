"""perf/pipeline.py as a user starts it: every policy over the MPI ring gives the tokens of the unsplit model."""

import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_pp_progress.bench._scenarios import POLICY_NAMES

PIPELINE = Path(__file__).resolve().parents[2] / "perf" / "pipeline.py"
LIMIT_S = 280


def run(*arguments):
    """Run the command with every policy and return what it ended with."""
    line = [sys.executable, PIPELINE, "--policies", ",".join(POLICY_NAMES), "--reentry-ms", "5", "--timeout", "240"]
    line += arguments
    return subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("concurrency", ["1", "4"])
@pytest.mark.parametrize("model", ["smollm2", "qwen3-random:tiny"])
def test_every_policy_gives_the_tokens_of_the_unsplit_model(model, concurrency):
    """At 1 and at 4 requests in flight, with logits as payload; real weights and a small Qwen3."""
    done = run("--model", model, "--requests", concurrency, "--concurrency", concurrency, "--max-tokens", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tokens are those of the unsplit model with every policy." in done.stdout
