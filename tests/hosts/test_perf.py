"""What runs from a checkout, on two hosts: the pipeline with a model, and what needs one clock."""

import sys

import pytest
from jobs import ROOT

PERF = ROOT / "perf"


def test_the_pipeline_runs_across_hosts(hosts):
    """Activations find their way as well; tokens are those of the unsplit model."""
    pytest.importorskip("torch")
    options = ["--model", "qwen3-random:tiny", "--pp", 2, "--policies", "patched", "--max-tokens", 10, "--requests", 1]
    command = [sys.executable, PERF / "pipeline.py", *options, "--transport", "default"]
    done = hosts(2, *command, options=["--slots", 1, "--name", "node.rack%"], limit=110)
    assert done.returncode == 0, done.stdout
    assert "Tokens are those of the unsplit model with every policy." in done.stdout
    assert "ranks 0 on node.rack1; 1 on node.rack2" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", [["hop", "--rounds", 10], ["test_perf.py", "--engine", "host-cpu"]])
def test_what_needs_one_clock_says_so(hosts, command):
    """Once, and measures nothing."""
    pytest.importorskip("torch")
    line = [PERF, *command] if command[0] == "hop" else [PERF / command[0], *command[1:]]
    slots = 1 if command[0] == "hop" else 2
    done = hosts(2, sys.executable, *line, options=["--slots", slots], limit=110)
    assert done.returncode in (1, 2), done.stdout
    assert done.stdout.count("clocks are up to 3.6e+03 s apart here: run it on one machine") == 1
    assert "Traceback" not in done.stdout
