"""Run steps in the order given on the command line, in this clean interpreter; print one line if all is well.

Steps: gate (the .pth's, with the variable set), import (upstream's stand-in), install, auto, construct, uninstall.
After each, the class is either patched once or exactly what it was; `BASELINE` is the stand-in's own view of its class,
taken when its module ended.
"""

import importlib
import json
import os
import sys

import trtllm_pp_progress as package

MODULE = "tensorrt_llm._torch.pyexecutor.py_executor"
WRAPPED = ("wait_on_pp_send_handles", "_ring_broadcast_sample_state", "_executor_loop_cleanup")


class Model:
    """What must be true, kept beside what is done."""

    waiting = patched = gated = False

    def do(self, step):
        """Do one step, and note what it must have done."""
        if step == "gate":
            os.environ["TRTLLM_PP_PROGRESS"] = "1"
            importlib.import_module("_trtllm_pp_progress_gate")
            self.gated = MODULE not in sys.modules
        elif step == "import":
            if MODULE not in sys.modules:
                self.patched, self.waiting = self.patched or self.waiting or self.gated, False
            importlib.import_module(MODULE)
            self.gated = False
        elif step == "auto":
            importlib.import_module("trtllm_pp_progress.auto")
            if MODULE in sys.modules:
                self.patched = True
            else:
                self.waiting = True
        elif step == "install":
            state = package.install().state
            if MODULE in sys.modules:
                assert state == ("already installed" if self.patched else "installed"), state
                self.patched = True
            else:
                assert state.startswith("already waiting" if self.waiting else "waiting"), state
                self.waiting = True
        elif step == "construct":
            executor = sys.modules[MODULE].PyExecutor()
            assert (type(executor.send_handles) is not list) == self.patched
            executor.send_handles[0] = Done()
            executor.wait_on_pp_send_handles(executor.send_handles, 0)
            assert executor.send_handles[0] is None
        elif step == "uninstall":
            assert bool(package.uninstall()) == self.patched
            self.patched = self.waiting = self.gated = False
        else:
            raise SystemExit(f"unknown step {step}")

    def check(self):
        """Compare the package and the class with what must be true."""
        status = package.status()
        assert (status["waiting"] is not None) == self.waiting, status
        assert len(status["installed"]) == package.installed() == self.patched, status
        assert status["stood_down"] == []
        if MODULE in sys.modules:
            module = sys.modules[MODULE]
            assert same(vars(module.PyExecutor), module.BASELINE) == (not self.patched)
            if self.patched:
                for name in WRAPPED:
                    assert vars(module.PyExecutor)[name].__wrapped__ is module.BASELINE[name], (
                        f"{name} is wrapped twice"
                    )


class Done(tuple):
    """A send that is complete, in pkl5's shape."""

    def test(self):
        """Say so."""
        return True, None

    def wait(self):
        """Return at once."""


def same(now, before):
    """Whether a class holds the very same objects as before, in the same order."""
    return list(now) == list(before) and all(now[name] is before[name] for name in before)


def main(steps):
    """Do the steps, then uninstall and import whatever was left out, and find the class as it was."""
    model = Model()
    model.check()
    for step in [*steps, "uninstall", "import"]:
        model.do(step)
        model.check()
    heavy = {"mpi4py", "torch", "numpy", "vllm"} & set(sys.modules)
    print(json.dumps({"done": steps, "heavy": sorted(heavy)}))


main(sys.argv[1:])
