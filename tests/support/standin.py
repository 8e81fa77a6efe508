"""A stand-in for upstream's package, on disk, and a script that says how its executor class was found."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
MODULE = "tensorrt_llm._torch.pyexecutor.py_executor"
SOURCE = """
from fakes import executor_class

PyExecutor = executor_class("E2")
BASELINE = dict(vars(PyExecutor))
"""
# Runs in any process of a test; prints one line of JSON, or writes it into a file of its own in the folder REPORTS.
REPORT = f"""
import importlib, importlib.util, json, os, sys
target = importlib.import_module({MODULE!r})
now, before = vars(target.PyExecutor), getattr(target, "BASELINE", {{}})
changed = [name for name in before if now[name] is not before[name]]
once = [name for name in changed if getattr(now[name], "__wrapped__", None) is before[name]]
found = json.dumps({{
    "pid": os.getpid(),
    "patched": bool(changed),
    "once": changed == once,
    "ours": sorted(name for name in sys.modules if "trtllm_pp_progress" in name and "editable" not in name),
    "path": sys.path,
    "user": getattr(sys, "users", None),
    "spec": importlib.util.find_spec({MODULE!r}).origin == target.__file__,
    "rank": os.environ.get("OMPI_COMM_WORLD_RANK"),
}})
if "REPORTS" in os.environ:
    with open(os.path.join(os.environ["REPORTS"], f"{{os.getpid()}}.json"), "x") as file:
        file.write(found)
else:
    print(found, flush=True)
"""


def write(folder, source=SOURCE):
    """Write the package into `folder`, which a process finds by PYTHONPATH."""
    target = Path(folder, *MODULE.split(".")[:-1])
    target.mkdir(parents=True)
    for package in (target, target.parent, target.parent.parent):
        (package / "__init__.py").touch()
    (target / "py_executor.py").write_text(source)
    (Path(folder) / "report.py").write_text(REPORT)
    return Path(folder)


def environment(*path, **variables):
    """Return this environment with PYTHONPATH and variables as given, and nothing of TensorRT-LLM's or a launcher's."""
    other = ("TRTLLM", "TLLM", "OMPI_", "PMIX_", "PMI_", "PRTE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(other)}
    kept.pop("PYTHONPATH", None)
    # A Python of another venv would not find this one's MPI.
    kept["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [f"{sys.prefix}/lib", kept.get("LD_LIBRARY_PATH")]))
    if path:
        kept["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return {**kept, **variables}


def run(line, env, code=0, **options):
    """Run a command line to its end, which must be `code`, and not in the checkout; return what it was."""
    options = {"cwd": "/", **options}
    line = [str(part) for part in line]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False, **options)
    assert done.returncode == code, f"{line} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def reports(output):
    """Return every report in an output, of which other lines are anybody's."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"pid"')]


def report(env, *arguments, python=sys.executable, code=None):
    """Run the report, or `code` before it, in a Python of its own; return the report and what was on stderr."""
    code = f"{code or ''}\nimport report"
    done = run([python, *arguments, "-c", code], env)
    (found,) = reports(done.stdout)
    return found, done.stderr
