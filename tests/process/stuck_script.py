"""An executor, one test of which never returns; then the process ends as told. Usage: stuck_script.py WAY WHO.

WHO sits in that test: the relay's thread or the keeper's. Exits with 3.
"""

import atexit
import sys
import threading
import time

from fakes import LIMIT_S, NEVER, FakeDist, FakeRequest, executor_class

import trtllm_pp_progress

NAMES = {"relay": "relay", "keeper": "pp-keeper"}
DEADLINE_S = 0.5


def main():
    """Get somebody stuck, and end."""
    way, who = sys.argv[1:]
    stuck = threading.Event()

    def inside():
        if threading.current_thread().name == NAMES[who]:
            stuck.set()
            threading.Event().wait()

    cls = executor_class("E2")
    trtllm_pp_progress.install(cls, drain_deadline_s=DEADLINE_S, mode="poll")
    executor = cls(FakeDist(lambda: FakeRequest(NEVER, inside=inside)))
    executor.start_worker()
    for slot in range(4):
        executor.executed_batch_queue.put(slot)
    for _ in range(4 if who == "keeper" else 1):
        executor.executed_batch_response_queue.get(timeout=LIMIT_S)
    if who == "keeper":
        executor._executor_loop_cleanup()  # abandons
    assert stuck.wait(LIMIT_S)
    started = time.monotonic()
    if way == "uninstall":
        assert trtllm_pp_progress.uninstall()
    elif way == "status":
        assert trtllm_pp_progress.status()["installed"]
    elif way == "shutdown":
        executor._executor_loop_cleanup()  # the rest of upstream's joins the relay thread, which is lost
    elif way == "lock":
        lock = executor.send_handles.sends.lock
        atexit.register(lock.acquire)
    print(f"took {time.monotonic() - started:.1f} s")
    sys.exit(3)


main()
