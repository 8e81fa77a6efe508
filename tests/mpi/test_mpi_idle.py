"""The relay thread between two batches: it pushes what is parked, and sleeps when nothing is."""

import os
import select
import time
from pathlib import Path

import pytest
from native_parts import native_threads
from outside import LIMIT_S
from rings import executor_of, generate, until

from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.pyexecutor.relay_queue import RelayQueue
from trtllm_pp_progress.tools.host import Request, RingStage, connect_pipeline

pytestmark = pytest.mark.mpi(min_size=2)

STILL_S = 0.05  # no wake-up for so long: asleep
WINDOW_S = 0.4
STEPS = 5


class Held(RingStage):
    """A stage whose wait for an activation ends early only when somebody says so: a re-entry into MPI by hand."""

    def __init__(self, *args):
        super().__init__(*args)
        self._wake, self.waker = os.pipe()

    def receive(self, timeout):
        """Wait for an activation, or until something is written to `waker`."""
        if self._before is None:
            return True
        if self._wake in select.select([self._before, self._wake], [], [])[0]:
            os.read(self._wake, 1)
            return False
        return super().receive(None)


@pytest.mark.parametrize("policy", ["patched", "patched-flush", "regressed"])
def test_a_parked_send_moves_while_the_executor_is_outside_mpi(comm, line, policy):
    """The last rank's executor never re-enters MPI: its 1 MB arrive with the patch, without it only once it does."""
    stage = Held(*connect_pipeline(comm), 0.02, 1_000_000)
    last = comm.size - 1
    with executor_of(comm, policy, stage=stage, reentry_s=None) as executor:
        if comm.rank == 0:
            executor.enqueue_requests([Request(0, [0], 1)])
            if policy == "regressed":
                with pytest.raises(TimeoutError):
                    executor.await_responses(1, 0.7)
                line.tell(last)
            (done,) = executor.await_responses(1, LIMIT_S)
            assert done.tokens == [0]
            if policy == "regressed":
                line.tell(last)
        elif comm.rank == last and policy == "regressed":
            line.hear(0)
            limit = time.monotonic() + LIMIT_S
            while line.hear(0, timeout=0.001) is None:
                assert time.monotonic() < limit
                os.write(stage.waker, b"w")
        line.meet()
        executor.shutdown()
    assert executor.wrong == 0


def wake_ups(thread):
    """Return how often a thread has left a core, and whether it sleeps now: a thread that stays asleep adds none.

    A thread that would run, but gets no core, does not count as asleep.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    switches = (task / "status").read_text(encoding="ascii").splitlines()
    state = (task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    return sum(int(text.split()[1]) for text in switches if "ctxt_switches" in text), state == "S"


def fall_asleep(thread):
    """Return once a thread has slept on for a while; one that wakes again and again never does."""
    limit = time.monotonic() + LIMIT_S
    while True:
        before = wake_ups(thread)
        time.sleep(STILL_S)
        if before == wake_ups(thread) and before[1]:
            return
        assert time.monotonic() < limit, "it never sleeps"


def switches(tasks):
    """Return how often native threads have left a core."""
    texts = [(task / "status").read_text(encoding="ascii") for task in tasks]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if "ctxt_switches" in line)


def still(tasks):
    """Tell whether native threads stay asleep for a while."""
    before = switches(tasks)
    time.sleep(STILL_S)
    return switches(tasks) == before


class Switch:
    """A request that is complete once it is told so; it never enters MPI."""

    done, tests = False, 0

    def test(self):
        """Answer as a pkl5 request does."""
        self.tests += 1
        return (self.done, None)

    def wait(self):
        """Fail: nobody may block on it."""
        raise AssertionError("the blocking wait was used")


@pytest.mark.parametrize(
    ("policy", "mode", "runs"),
    [
        ("patched", "poll", "poll"),
        ("patched-flush", "poll", "poll"),
        ("patched", "auto", "native"),
    ],
)
def test_with_nothing_pending_the_relay_thread_never_wakes(comm, line, policy, mode, runs):
    """No MPI call and no timed wait: the system does not schedule the thread once; with a send pending it does.

    Nor does a native driver's thread, which enters no MPI either.
    """
    others = native_threads()  # the keeper's
    with executor_of(comm, policy, reentry_s=0.005, settings={"mode": mode}) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
        line.meet()
        relay, queue = executor.broadcast_sample_state_handler, executor.executed_batch_queue
        assert isinstance(queue, RelayQueue)
        fall_asleep(relay)
        assert not engine_of(executor).pending()
        line.meet()
        driver, natives = engine_of(executor).driver, native_threads() - others
        assert len(natives) == (runs == "native")
        until(lambda: still(natives))
        before = wake_ups(relay), switches(natives), queue.timed_waits, driver.status()
        assert (before[3]["runs"], before[3]["state"]) == (runs, "none" if runs == "poll" else "idle")
        time.sleep(WINDOW_S)
        assert (wake_ups(relay), switches(natives), queue.timed_waits, driver.status()) == before

        switch = executor.send_handles[100] = Switch()  # control, and the way back
        if runs == "poll":
            until(lambda: switch.tests > 10)
            assert queue.timed_waits > before[2]
            assert wake_ups(relay)[0] > before[0][0]
            switch.done = True
        else:  # the native thread's turn: the relay sleeps on, and who needs the slot tests
            until(lambda: driver.status()["ticks"] > before[3]["ticks"] + 10)
            assert switches(natives) > before[1]
            assert (wake_ups(relay), queue.timed_waits) == (before[0], before[2])
            switch.done = True
            executor.wait_on_pp_send_handles(executor.send_handles, 100)
            assert driver.status()["state"] == "idle"
        until(lambda: executor.send_handles[100] is None)
        fall_asleep(relay)
        line.meet()
        executor.shutdown()


def test_the_pump_of_the_last_era_wakes_all_the_time(comm, line):
    """Control: the same look at era H, which calls MPI every 5 ms whether a send is pending or not."""
    with executor_of(comm, "iprobe", reentry_s=0.005) as executor:
        if comm.rank == 0:
            generate(executor, STEPS)
        line.meet()
        before = wake_ups(executor.broadcast_sample_state_handler)[0]
        until(lambda: wake_ups(executor.broadcast_sample_state_handler)[0] > before + 10)
        line.meet()
        executor.shutdown()
