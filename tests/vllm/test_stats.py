"""Spans of GPU streams: read late, never waited for, bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from trtllm_pp_progress.vllm.timer import StreamTimer


class FakeEvent:
    """An event whose passing the test decides."""

    made = 0

    def __init__(self, clock):
        FakeEvent.made += 1
        self.clock, self.at = clock, None

    def record(self, stream):
        self.at = stream["now"]

    def query(self):
        if self.clock["broken"]:
            raise RuntimeError("CUDA error")
        return self.at <= self.clock["passed"]

    def elapsed_time(self, end):
        assert self.query()
        assert end.query()
        return float(end.at - self.at)


def make(limit=8):
    clock = {"now": 0, "passed": -1, "broken": False}
    return clock, StreamTimer(lambda: FakeEvent(clock), limit)


def span(clock, timer, length):
    start = timer.start(clock)
    clock["now"] += length
    timer.stop(start, clock)


def test_a_span_counts_once_it_has_passed():
    """A span the GPU has not reached is neither read nor waited for."""
    clock, timer = make()
    span(clock, timer, 5)
    span(clock, timer, 3)
    assert timer.summary() == {"count": 0, "total_ms": 0.0, "longest_ms": 0.0, "dropped": 0}
    clock["passed"] = 5
    assert timer.summary() == {"count": 1, "total_ms": 5.0, "longest_ms": 5.0, "dropped": 0}
    clock["passed"] = 8
    assert timer.summary() == {"count": 2, "total_ms": 8.0, "longest_ms": 5.0, "dropped": 0}


def test_events_are_used_again_and_never_more_than_the_limit():
    """A GPU that keeps up needs a handful of events; one that hangs costs the limit and no more."""
    clock, timer = make()
    FakeEvent.made = 0
    for _ in range(100):
        span(clock, timer, 1)
        clock["passed"] = clock["now"]
    assert FakeEvent.made <= 17
    clock["passed"] = -1
    for _ in range(100):
        span(clock, timer, 1)
    assert FakeEvent.made <= 17
    assert timer.summary()["dropped"] >= 92 - 4


def test_a_cancelled_span_leaves_its_event():
    """A wait that did not take place is not measured."""
    clock, timer = make()
    timer.cancel(timer.start(clock))
    clock["passed"] = 9
    assert timer.summary()["count"] == 0


def test_a_gpu_in_error_does_not_keep_the_summary():
    """What was read before an error can still be reported."""
    clock, timer = make()
    span(clock, timer, 2)
    clock["passed"] = 2
    timer.collect()
    span(clock, timer, 2)
    clock["broken"] = True
    assert timer.summary()["total_ms"] == 2.0


def test_another_thread_hears_what_is_known_and_touches_no_event():
    """A scrape must not race with the thread that times, nor query an event while that captures a graph."""
    clock, timer = make()
    span(clock, timer, 2)
    clock["passed"] = 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(timer.summary).result(10)["count"] == 0
        assert timer.summary()["count"] == 1
        assert pool.submit(timer.summary).result(10)["count"] == 1
