"""The end of a process with a send that nobody receives: upstream's own shutdown at exit ends, before ours or after."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import standin
from standin import TESTS

import trtllm_pp_progress

ROOT = Path(trtllm_pp_progress.__file__).parents[1]
DEADLINE_S = 1.0
LIMIT_S = 40  # only a hang reaches it
HANGS_S = 8  # and the control does

SCRIPT = """
import atexit, sys, threading
from fakes import FakeDist, executor_class

order = sys.argv[1]
living, waiting = [], []


class Never:
    # A send that nobody receives; its wait has no end.
    def test(self):
        return False, None

    def wait(self):
        threading.Event().wait()


def shutdown():
    for thread in waiting:  # as upstream's waits for its executor thread to begin the cleanup
        thread.join()
    for executor in living:
        executor.shutdown()
        print("events", executor.events)


def register():
    atexit.register(shutdown)


if order in ("registered first", "with a wait under way"):  # and so called last
    register()
if order != "unpatched":
    import trtllm_pp_progress
cls = executor_class("E2")
if order != "unpatched":
    trtllm_pp_progress.install(cls)
if order not in ("registered first", "with a wait under way"):
    register()
executor = cls(FakeDist(Never))
executor.start_worker()
for batch in range(2):
    executor.executed_batch_queue.put(batch)
for batch in range(2):
    executor.executed_batch_response_queue.get()
living.append(executor)
if order == "with a wait under way":
    executor.send_schedule_handles[0] = Never()
    wait = lambda: executor.wait_on_pp_send_handles(executor.send_schedule_handles, 0)
    waiting.append(threading.Thread(target=wait, daemon=True))
    waiting[0].start()
if order == "in a thread":  # which the interpreter joins before any atexit hook
    atexit.unregister(shutdown)
    threading.Thread(target=lambda: (threading.main_thread().join(), shutdown())).start()
"""


def run(order, limit_s):
    """Run the script to its end, and return what it printed."""
    env = standin.environment(ROOT, TESTS, TRTLLM_PP_PROGRESS_DRAIN_DEADLINE_S=str(DEADLINE_S))
    line = [sys.executable, "-c", SCRIPT, order]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=limit_s, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("order", ["registered first", "registered last", "in a thread", "with a wait under way"])
def test_upstreams_shutdown_at_exit_ends(order):
    """Whichever comes first: it is patched to its end, and gives up what nobody receives at one deadline."""
    started = time.monotonic()
    done = run(order, LIMIT_S)
    assert done.stdout == "events ['notified']\n"
    assert done.stderr.count("abandoned the send in send_handles") == 2
    assert done.stderr.count("abandoned the send in send_schedule_handles") == (order == "with a wait under way")
    assert time.monotonic() - started >= DEADLINE_S


def test_without_the_patch_it_would_not():
    """Control: the same program, unpatched, waits for ever and is killed by its deadline."""
    with pytest.raises(subprocess.TimeoutExpired):
        run("unpatched", HANGS_S)
