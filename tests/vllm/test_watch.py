"""The stall watch: what it calls a stall, how often it says so, and when it keeps still."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from trtllm_pp_progress.vllm.stall_watch import StallWatch


class World:
    """A clock, a step and a stream that a test sets."""

    def __init__(self, warn_s=8.0):
        self.now, self.step, self.busy, self.said = 100.0, 0, False, []
        self.watch = StallWatch(
            lambda: self.busy, lambda: self.step, lambda *word: self.said.append(word), warn_s, lambda: self.now
        )

    def look(self, at):
        self.now = 100.0 + at
        self.watch.look()


def test_a_stall_is_told_once_and_so_is_its_end():
    """Busy with no step begun for the limit: one line; when it goes on: one more, with how long it was."""
    world = World()
    world.look(0)
    world.busy = True
    for at in range(1, 12):
        world.look(at)
        assert world.said == ([(8.0, False)] if at >= 8 else [])
    assert world.watch.stalled_s() == 11.0
    world.busy = False
    world.look(12)
    world.look(13)
    assert world.said == [(8.0, False), (12.0, True)]
    assert (world.watch.stalls, world.watch.stalled_s()) == (1, 0.0)


@pytest.mark.parametrize(("steps", "busy"), [(True, True), (False, False)])
def test_work_and_silence_are_no_stalls(steps, busy):
    """A stream that is always busy while steps begin is at work; an idle one with no step is an idle engine."""
    world = World()
    world.busy = busy
    for at in range(0, 100):
        world.step += steps
        world.look(at)
    assert world.said == []


def test_a_second_stall_is_told_again():
    """Each has its own line."""
    world = World()
    for start in (0, 50):
        world.step += 1
        world.busy = True
        world.look(start)
        world.look(start + 9)
    assert world.said == [(9.0, False), (50.0, True), (9.0, False)]
    assert world.watch.stalls == 2


def test_once_stopped_it_asks_nothing():
    """Stopping waits for a question that is under way, and none follows: a graph may be captured then."""
    asked, answer = threading.Semaphore(0), threading.Event()

    def busy():
        asked.release()
        assert answer.wait(10)
        return True

    watch = StallWatch(busy, lambda: 0, lambda *word: None, 0.01)
    watch.start()
    watch.start()
    assert asked.acquire(timeout=10)
    stopper = threading.Thread(target=watch.stop)
    stopper.start()
    assert stopper.is_alive()
    answer.set()
    stopper.join(10)
    while asked.acquire(blocking=False):
        pass
    threads = [thread for thread in threading.enumerate() if thread.name == "pp-stall-watch"]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not asked.acquire(blocking=False)


def test_the_thread_keeps_nothing_alive():
    """A worker that is dropped without a shutdown goes, with its GPU memory, and the thread ends by itself."""
    world = World(warn_s=0.01)
    world.watch.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pp-stall-watch"]
    gone = weakref.ref(world)
    del world
    gc.collect()
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


def test_a_gpu_that_answers_no_more_ends_the_watch():
    """An error of the stream's own is vLLM's to report."""
    asked = threading.Event()

    def busy():
        asked.set()
        raise RuntimeError("CUDA error")

    watch = StallWatch(busy, lambda: 0, lambda *word: None, 0.01)
    watch.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "pp-stall-watch"]
    assert asked.wait(10)
    thread.join(10)
    assert not thread.is_alive()
