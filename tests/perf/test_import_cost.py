"""What the ways in cost others: `import tensorrt_llm`, a stand-in with many modules, in a process with the gate."""

import json
import re

import standin
from standin import TESTS, run

MODULES = 3000  # more than upstream's import brings, torch included
LIMIT_S = 5e-3
ROUNDS = 5
# All that the gate adds to an import is one call for each module; two imports as a whole differ by more than that by
# chance. So: how often it is called, times what a call takes, where nobody else had the core.
MEASURE = """
import json, sys, timeit
import _trtllm_pp_progress_gate as gate
calls = []
find = gate._Gate.find_spec
gate._Gate.find_spec = staticmethod(lambda *arguments: calls.append(arguments) or find(*arguments))
import tensorrt_llm
once = min(timeit.repeat(lambda: [find(*arguments) for arguments in calls], number=1, repeat=50))
ours = sorted(name for name in sys.modules if "trtllm_pp_progress" in name)
print(json.dumps([len(calls), once, ours]))
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
        calls, seconds, ours = json.loads(run([places.python, "-c", MEASURE], env).stdout)
        start = min(gate_import_s(places, env) for _ in range(ROUNDS))
        print(f"{variables}: {1e3 * seconds:.2f} ms in {calls} calls, {1e3 * start:.2f} ms at the interpreter's start")
        assert calls > MODULES
        assert ours == ["_trtllm_pp_progress_gate"]
        assert seconds + start < LIMIT_S


def gate_import_s(places, env):
    """Return the seconds that the .pth's import takes, as Python itself measures them."""
    said = run([places.python, "-X", "importtime", "-c", ""], env).stderr
    return int(re.search(r"\|\s*(\d+) \|\s*_trtllm_pp_progress_gate$", said, re.M)[1]) * 1e-6
