"""Every order of import, install, construct and uninstall in a clean interpreter: patched once, always restored."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import standin
from standin import TESTS

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
SCRIPT = Path(__file__).with_name("order_script.py")
STEPS = ("import", "install", "construct", "uninstall")


def orders():
    """Return each order of the steps, alone and with another way in, in which a class is imported before it is used.

    Another way in: a second install, `auto`, or the late gate of the .pth, which is there before anything else.
    """
    found = {*itertools.permutations(STEPS)}
    for other in ("install", "auto"):
        found |= {*itertools.permutations([*STEPS, other])}
    found |= {("gate", *order) for order in found}
    return sorted(order for order in found if order.index("import") < order.index("construct"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Write a stand-in for upstream's package, and return the environment in which it is found."""
    return standin.environment(standin.write(tmp_path_factory.mktemp("site")), ROOT, TESTS)


def run(steps, environment):
    """Run the steps in a clean interpreter."""
    command = [sys.executable, str(SCRIPT), *steps]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_orders_are_all_there_are():
    """Half of 24 orders, half of 60 with two installs, half of 120 with auto, all with the gate and without."""
    assert len(orders()) == 2 * (12 + 30 + 60)
    assert {len(order) for order in orders()} == {4, 5, 6}


@pytest.mark.parametrize("steps", orders(), ids="-".join)
def test_in_every_order_the_class_is_patched_once_and_restored(steps, environment):
    """After each step the class is patched exactly once or exactly what it was, as the steps so far demand."""
    done = run(steps, environment)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert json.loads(done.stdout) == {"done": list(steps), "heavy": []}


def test_a_step_that_goes_wrong_is_seen(environment):
    """Control: constructing before the import fails, and so does the run."""
    assert run(["construct", "import"], environment).returncode == 1
