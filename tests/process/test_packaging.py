"""What can be built and installed where: free-threaded Pythons, and stacks that hold a dependency back."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from places import ROOT, SHIPPED

# What setuptools asks a Python for to know that it is free-threaded.
FREE_THREADED = """
import runpy, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
runpy.run_path("setup.py")
"""


def build(folder, *options):
    """Build a wheel of this package in a folder, as a free-threaded Python does."""
    for name in (*SHIPPED, "_trtllm_pp_progress_gate.py"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "trtllm_pp_progress", folder / "trtllm_pp_progress", ignore=ignored)
    line = [sys.executable, "-c", FREE_THREADED, "bdist_wheel", *options]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_case_60_a_free_threaded_python_builds_the_wheel(tmp_path):
    """pypa/setuptools#4420: its name has no version of Python, and no limited API that such a build refuses."""
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.fullmatch(r"trtllm_pp_progress-[\w.]+-py3-none-linux_\w+\.whl", wheel.name)


@pytest.mark.skipif(sys.version_info >= (3, 15), reason="a free-threaded Python from 3.15 on takes a limited API")
def test_case_60_a_limited_api_would_be_refused(tmp_path):
    """Control: what asks for it ends the build."""
    done = build(tmp_path, "--py-limited-api", "cp310")
    assert done.returncode != 0
    assert "is incompatible with `Py_GIL_DISABLED`" in done.stderr


def test_case_86_a_stack_that_holds_wrapt_back_is_not_upgraded():
    """open-telemetry/opentelemetry-python-contrib#3903: from 1.14 on and no end; ci/matrix.sh tries its rows."""
    (asked,) = [found for found in requires("trtllm-pp-progress") if found.startswith("wrapt")]
    assert asked == "wrapt>=1.14"
    rows = (ROOT / "ci" / "row.sh").read_text()
    assert "--resolution lowest-direct" in rows
    assert "wrapt==1.17.*" in rows


def test_case_86_what_wrapt_is_used_for_is_in_every_release():
    """Its proxy alone, which has been there from the first."""
    used = set()
    for path in Path(ROOT, "trtllm_pp_progress").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "wrapt":
                used.add(node.attr)
            assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wrapt"))
    assert used == {"ObjectProxy"}
