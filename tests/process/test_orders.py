"""Every order of import, install, construct and uninstall in a clean interpreter: patched once, always restored."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
SCRIPT = Path(__file__).with_name("order_script.py")
STEPS = ("import", "install", "construct", "uninstall")
STAND_IN = """
from fakes import executor_class

PyExecutor = executor_class("E2")
BASELINE = dict(vars(PyExecutor))
"""


def orders():
    """Return each order of the steps, with one install and with two, in which a class is imported before it is used."""
    found = {*itertools.permutations(STEPS), *itertools.permutations([*STEPS, "install"])}
    return sorted(order for order in found if order.index("import") < order.index("construct"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Write a stand-in for upstream's package, and return the environment in which it is found."""
    folder = tmp_path_factory.mktemp("site")
    target = folder / "tensorrt_llm" / "_torch" / "pyexecutor"
    target.mkdir(parents=True)
    for package in (target, target.parent, target.parent.parent):
        (package / "__init__.py").touch()
    (target / "py_executor.py").write_text(STAND_IN)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM")}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests")))}


def run(steps, environment):
    """Run the steps in a clean interpreter."""
    command = [sys.executable, str(SCRIPT), *steps]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_orders_are_all_there_are():
    """Half of 24 orders with one install, half of 60 with two: none is written by hand, none is missing."""
    assert len(orders()) == 12 + 30
    assert {len(order) for order in orders()} == {4, 5}


@pytest.mark.parametrize("steps", orders(), ids="-".join)
def test_in_every_order_the_class_is_patched_once_and_restored(steps, environment):
    """After each step the class is patched exactly once or exactly what it was, as the steps so far demand."""
    done = run(steps, environment)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert json.loads(done.stdout) == {"done": list(steps), "heavy": []}


def test_a_step_that_goes_wrong_is_seen(environment):
    """Control: constructing before the import fails, and so does the run."""
    assert run(["construct", "import"], environment).returncode == 1
