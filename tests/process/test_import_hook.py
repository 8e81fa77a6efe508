"""An import of upstream's module from a thread that its own package has started: no hook of ours may wait for it.

DataDog/dd-trace-py#17742: a finder that looks its module up by importlib.util.find_spec waits for the parent package,
which waits for that very thread.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import standin
from standin import TESTS

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
PACKAGE = standin.MODULE.rpartition(".")[0]
LIMIT_S = 30  # only a hang reaches it
HANGS_S = 6  # and of the controls each does

THREADED = f"""
import importlib, threading

thread = threading.Thread(target=importlib.import_module, args=({standin.MODULE!r},))
thread.start()
thread.join()
"""

FINDER = f"""
import importlib.util, sys

class Finder:
    asking = False

    def find_spec(self, name, path=None, target=None):
        if name != {standin.MODULE!r} or self.asking:
            return None
        self.asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.asking = False

sys.meta_path.insert(0, Finder())
"""

WAYS = {
    "no hook": ("", {}, False),
    "install": ("import trtllm_pp_progress; trtllm_pp_progress.install()", {}, True),
    "auto": ("import trtllm_pp_progress.auto", {}, True),
    "gate": ("import _trtllm_pp_progress_gate", {"TRTLLM_PP_PROGRESS": "1"}, True),
    "gate, then install": (
        "import _trtllm_pp_progress_gate, trtllm_pp_progress; trtllm_pp_progress.install()",
        {"TRTLLM_PP_PROGRESS": "1"},
        True,
    ),
    "gate, off": ("import _trtllm_pp_progress_gate", {"TRTLLM_PP_PROGRESS": "0"}, False),
}


@pytest.fixture(scope="module")
def threaded(tmp_path_factory):
    """Return a folder with a stand-in whose package starts such a thread."""
    folder = standin.write(tmp_path_factory.mktemp("threaded"))
    Path(folder, *standin.MODULE.split(".")[:-1], "__init__.py").write_text(THREADED)
    return folder


def report(folder, code, limit_s, **variables):
    """Import the package in a clean interpreter, after `code`; return how its class was found."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport {PACKAGE}, report"],
        env=standin.environment(folder, ROOT, TESTS, TRTLLM_PP_PROGRESS_DOOR="0", **variables),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    (found,) = standin.reports(done.stdout)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_case_59_a_thread_may_import_the_module_that_its_package_waits_for(way, threaded):
    """By every way in; the class is patched once, and the module is as if nobody had looked."""
    code, variables, patched = WAYS[way]
    found = report(threaded, code, LIMIT_S, **variables)
    assert (found["patched"], found["once"], found["spec"]) == (patched, True, True)


@pytest.mark.parametrize(
    "code",
    [FINDER, f"import wrapt; wrapt.register_post_import_hook(print, {standin.MODULE!r})"],
    ids=["find_spec", "wrapt"],
)
def test_case_59_a_finder_that_looks_the_module_up_itself_would_hang(code, threaded):
    """Control: the same import, with a finder that does so, is killed by its deadline."""
    with pytest.raises(subprocess.TimeoutExpired):
        report(threaded, code, HANGS_S)


@pytest.mark.parametrize("code", [FINDER], ids=["find_spec"])
def test_without_the_thread_such_a_finder_does_not(code, tmp_path):
    """Control: what hangs is not the finder by itself."""
    found = report(standin.write(tmp_path), code, LIMIT_S)
    assert not found["patched"]
