"""perf/pipeline.py as a user starts it: every policy over the MPI ring gives the tokens of the unsplit model."""

import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_pp_progress.tools.bench.scenarios import POLICY_NAMES

PIPELINE = Path(__file__).resolve().parents[2] / "perf" / "pipeline.py"
LIMIT_S = 280


RUNS = {
    # Every relay with sample states that need a rendezvous; real weights and their logits with three.
    "qwen3-random:tiny": ["--policies", ",".join(POLICY_NAMES), "--payload", "200000"],
    "smollm2": ["--policies", "regressed,flush,patched"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", RUNS)
def test_every_policy_gives_the_tokens_of_the_unsplit_model(model):
    """With four requests in flight, then with the fifth alone."""
    line = [sys.executable, PIPELINE, "--model", model, "--requests", "5", "--concurrency", "4", "--max-tokens", "10"]
    line += ["--reentry-ms", "5", "--timeout", "240", *RUNS[model]]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tokens are those of the unsplit model with every policy." in done.stdout
