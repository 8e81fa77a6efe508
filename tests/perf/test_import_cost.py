"""What the ways in cost others: `import tensorrt_llm` of a stand-in with many modules, with the gate and without."""

import json
import re

import standin
from standin import TESTS, run

MODULES = 1000  # about half of what upstream's own import brings, without torch
LIMIT_S = 5e-3
ROUNDS = 5
# In one process: CPU seconds of the import, with the gate as the .pth has left it or called off before.
MEASURE = """
import json, sys, time
import _trtllm_pp_progress_gate as gate
if sys.argv[1] == "without":
    gate.close()
started = time.process_time()
import tensorrt_llm
seconds = time.process_time() - started
print(json.dumps([seconds, sorted(name for name in sys.modules if "trtllm_pp_progress" in name)]))
"""


def test_importing_upstream_costs_nothing_that_counts(places, tmp_path):
    """Below 5 ms, start of the interpreter included, variable set or not; nothing of ours comes along."""
    standin.write(tmp_path)
    package = tmp_path / "tensorrt_llm"
    for number in range(MODULES):
        (package / f"part{number}.py").write_text("")
    (package / "__init__.py").write_text("".join(f"from . import part{number}\n" for number in range(MODULES)))
    for variables in ({}, {"TRTLLM_PP_PROGRESS": "1"}):
        env = standin.environment(tmp_path, TESTS, **variables)
        costs = {"with": [], "without": []}
        for _ in range(ROUNDS):
            for how, found in costs.items():
                seconds, ours = json.loads(run([places.python, "-c", MEASURE, how], env).stdout)
                assert ours == ["_trtllm_pp_progress_gate"]
                found.append(seconds)
        start = min(gate_import_s(places, env) for _ in range(ROUNDS))
        cost = start + min(costs["with"]) - min(costs["without"])
        print(f"{variables}: {1e3 * cost:.2f} ms more, of which {1e3 * start:.2f} at the interpreter's start")
        assert cost < LIMIT_S


def gate_import_s(places, env):
    """Return the seconds that the .pth's import takes, as Python itself measures them."""
    said = run([places.python, "-X", "importtime", "-c", ""], env).stderr
    return int(re.search(r"\|\s*(\d+) \|\s*_trtllm_pp_progress_gate$", said, re.M)[1]) * 1e-6
