"""Stand-ins for what the package meets: send handles of each shape, a driver, a clock, a wait, an executor of each era.

Every handle watches itself: a second thread inside test() or wait(), a touch after completion, a blocking wait that
nothing could end, a cancel or a free of a send is noted in `FAULTS`, which the unit tests find empty at their end.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

FAULTS: list[str] = []  # what no handle should ever see; a negative control empties it after looking
NEVER = math.inf
LIMIT_S = 20.0  # only a fault makes a wait of the tests reach it


class SendFailedError(RuntimeError):
    """What a broken send raises."""


class FakeSend:
    """A send that is complete at its `after`-th test (0: at once; NEVER: when complete() is called, once received).

    `error` is raised instead of an answer: by every test and wait, or by the first `errors` of them. `inside` is
    called within each test, where races are staged. `payload` stands for the buffer.
    """

    def __init__(
        self,
        after: float = 1,
        error: Exception | None = None,
        *,
        errors: float = math.inf,
        inside: Callable[[], object] = lambda: None,
        payload: object = None,
    ) -> None:
        self.after, self.error, self.errors, self.inside, self.payload = after, error, errors, inside, payload
        self.tests = self.waits = self.raised = 0
        self.seen = False  # somebody was told that it is complete
        self._owner = threading.Lock()

    @property
    def touches(self) -> int:
        """How often anybody tested or waited."""
        return self.tests + self.waits

    def complete(self) -> None:
        """Let the receiver arrive: the next test says yes."""
        self.after = 0

    def fail(self, error: Exception) -> None:
        """Break the connection: what comes next raises."""
        self.error = error

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._owner.acquire(blocking=False):
            FAULTS.append(f"{what} while another thread was inside")
            raise AssertionError(FAULTS[-1])
        try:
            yield
        finally:
            self._owner.release()

    def _raise(self) -> None:
        if self.error is not None and self.errors > 0:
            self.errors -= 1
            self.raised += 1
            raise self.error

    def ask(self) -> bool:
        """Answer a test."""
        with self._alone("test"):
            self.tests += 1
            if self.seen:
                FAULTS.append("test of a send that was already seen complete")
            self.inside()
            self._raise()
            self.seen = self.tests >= self.after
            return self.seen

    def block(self) -> None:
        """Answer a wait; one that nothing could end is a fault instead of a hang."""
        with self._alone("wait"):
            self.waits += 1
            self.inside()
            self._raise()
            if self.after == NEVER:
                FAULTS.append("blocking wait for a send that nobody receives")
                raise AssertionError(FAULTS[-1])
            self.seen = True

    def cancel(self) -> None:
        """Note that a send was cancelled or freed, which the standard's implementations do not survive."""
        FAULTS.append("cancel or free of a send")

    Cancel = Free = cancel


class FakeRequest(FakeSend, tuple[str, object]):
    """pkl5's shape: a tuple subclass with a truthy answer, (False, None), while it is pending."""

    def __new__(cls, *args: Any, **kwargs: Any) -> FakeRequest:
        """Make a tuple that equals no other."""
        return tuple.__new__(cls, ("header", object()))

    def test(self) -> tuple[bool, None]:
        """Answer (flag, message)."""
        return self.ask(), None

    def wait(self) -> None:
        """Block until complete."""
        self.block()


class FakeMpiRequest(FakeSend):
    """The shape of mpi4py's own MPI.Request: the same answers, and no tuple."""

    def test(self) -> tuple[bool, None]:
        """Answer (flag, message)."""
        return self.ask(), None

    def wait(self) -> None:
        """Block until complete."""
        self.block()


class FakePart(FakeSend):
    """A member of a pkl5 request: mpi4py's upper-case Test."""

    def Test(self) -> bool:
        """Answer a flag; a complete one is MPI_REQUEST_NULL, which may be asked again."""
        return self.seen or self.ask()


class FakeParts(tuple[FakePart, ...]):
    """A pkl5 request as it really is: a tuple of requests."""


class FakePlainRequest(FakeSend):
    """A handle whose test() answers a bare flag."""

    def wait(self) -> None:
        """Block until complete."""
        self.block()

    def test(self) -> bool:
        """Answer a flag."""
        return self.ask()


class FakeWork(FakeSend):
    """The shape of torch.distributed's Work: is_completed(), and a wait() that raises what went wrong."""

    def wait(self) -> None:
        """Block until complete."""
        self.block()

    def is_completed(self) -> bool:
        """Answer a flag; a Work may be asked again after it was complete."""
        self.seen = False
        return self.ask()


class FakeMultiHandleWrapper:
    """The shape of the Ray path's wrapper: several works and nothing but wait()."""

    def __init__(self, works: list[FakeWork]) -> None:
        self.works, self.waits = works, 0

    def wait(self) -> None:
        """Block until all are complete."""
        self.waits += 1
        for work in self.works:
            work.wait()


class FakeNativeTest:
    """What tests a pkl5 request from C: as many rounds as allowed, `tests_a_call` at most, until it is complete."""

    def __init__(self, tests_a_call: float) -> None:
        self._most = tests_a_call
        self.used = 0
        self.moved = False
        self.stops: list[int | None] = []  # of each call
        self.limits_s: list[float] = []

    def __call__(self, request: FakeParts, rounds: int, limit_s: float, stop: int | None = None) -> bool:
        """Test."""
        self.used, done = 0, False
        self.stops.append(stop)
        self.limits_s.append(limit_s)
        while self.used < min(rounds, self._most) and not done:
            self.used += 1
            done = all(part.Test() for part in request)
        return done


class FakeTester:
    """Tests requests of pkl5's shape from C; `made` lists what it has made for that, one for each table."""

    def __init__(self, tests_a_call: float = 1000) -> None:
        self.tests_a_call = tests_a_call
        self.made: list[FakeNativeTest] = []

    def new(self) -> FakeNativeTest:
        """Return a test for whoever holds a lock of its own."""
        self.made.append(FakeNativeTest(self.tests_a_call))
        return self.made[-1]

    def takes(self, handle: object) -> bool:
        """Tell whether it is such a request."""
        return isinstance(handle, FakeParts)


class FakeDriver:
    """A driver that writes down what it is told; `native` says whether a thread of its own would step in."""

    def __init__(self, native: bool = False, tester: FakeTester | None = None) -> None:
        self.native, self.tester, self.may_spin = native, tester, tester is not None
        self.told: list[str] = []
        self.planned: list[float] = []  # pauses that were announced, in seconds
        self.late: list[float] = []

    def start(self, crowded: bool) -> None:
        """Note it."""
        self.told.append("start")

    def arm(self, planned_s: float = 0.0) -> bool:
        """Note it."""
        self.told.append("arm")
        self.planned += [planned_s] if planned_s else []
        return self.native

    def rest(self, pending: Callable[[], bool], receiving: bool = False) -> None:
        """Note whether it could rest."""
        self.told.append("receiving" if receiving and pending() else "stay" if pending() else "rest")

    def turn(self, on: bool) -> None:
        """Note it."""
        self.told.append("on" if on else "off")

    def overslept(self, late_s: float) -> None:
        """Note how late a pause was."""
        self.late.append(late_s)

    def stop(self, timeout_s: float | None = None) -> None:
        """Note it."""
        self.told.append("stop")

    def status(self) -> dict[str, Any]:
        """Return what every driver says."""
        state = {"state": "none", "ticks": 0, "silences": 0, "longest_silence_s": 0.0}
        return {"runs": "native" if self.native else "poll", "reason": "selected"} | state


class FakeNative:
    """A native thread, beneath the package's own driver: whether it is armed, and what it was told."""

    def __init__(self, silence_s: float = 0.0) -> None:
        self.silence_s, self.armed, self.runs, self.ticks = silence_s, False, True, 0
        self.told: list[str] = []
        self._failed = ""

    @property
    def state(self) -> str:
        """Say whether it is armed, or how it failed."""
        return self._failed or ("armed" if self.armed else "idle")

    def fails(self, how: str) -> None:
        """Step in no more."""
        self.runs, self._failed = False, how

    def driven(self, planned_s: float = 0.0) -> bool:
        """Be armed."""
        self.told.append("driven")
        self.armed = True
        return self.runs

    def receiving(self) -> None:
        """Note it."""
        self.told.append("receiving")

    def idle(self) -> None:
        """Be at rest."""
        self.told.append("idle")
        self.armed = False

    def stop(self, timeout_s: float = 0.0) -> bool:
        """End."""
        self.told.append("stop")
        self.armed = self.runs = False
        return True


class FakeMpi(ModuleType):
    """mpi4py.MPI as far as this package asks it; put it into sys.modules."""

    ANY_SOURCE = -1
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)

    def __init__(self, level: int = 3, vendor: str = "Open MPI") -> None:
        super().__init__("mpi4py.MPI")
        self.vendor = vendor
        self.level, self.initialized, self.finalized = level, True, False
        self.attributes: list[Callable[[Any, Any, Any], object]] = []
        self.COMM_SELF = SimpleNamespace(Set_attr=lambda keyval, value: self.attributes.append(keyval))
        self.Comm = SimpleNamespace(Create_keyval=lambda delete_fn: delete_fn)

    def get_vendor(self) -> tuple[str, tuple[int, int, int]]:
        """Return who made it, and its version."""
        return self.vendor, (5, 0, 0)

    def Query_thread(self) -> int:
        """Return the thread level."""
        return self.level

    def Is_initialized(self) -> bool:
        """Say whether it is."""
        return self.initialized

    def Is_finalized(self) -> bool:
        """Say whether it is."""
        return self.finalized

    def Finalize(self) -> None:
        """Delete the attributes of COMM_SELF, the last one first, and end."""
        while self.attributes:
            self.attributes.pop()(None, None, None)
        self.finalized = True


class FakeClock:
    """A clock that only pauses move: `FakeClock()()` tells the time, `pause` passes it and calls `on_pause`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.pauses: list[float] = []
        self.on_pause: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        """Tell the time."""
        return self.now

    def pause(self, seconds: float) -> None:
        """Let that much time pass."""
        self.pauses.append(seconds)
        self.now += seconds
        self.on_pause()


class FakeWait:
    """A condition's wait for RelayQueue: notes each time-out and plays the next step of a script, lock released.

    A timed wait lets its time pass. An untimed one without a step left would sleep for ever, which is an error here.
    """

    def __init__(self, clock: FakeClock, *script: Callable[[], object] | None) -> None:
        self.clock, self.script = clock, list(script)
        self.timeouts: list[float | None] = []

    def __call__(self, condition: threading.Condition, timeout: float | None) -> None:
        """Wait."""
        self.timeouts.append(timeout)
        if timeout is not None:
            self.clock.now += timeout
        elif not self.script:
            raise AssertionError("would sleep for ever")
        step = self.script.pop(0) if self.script else None
        if step is not None:
            condition.release()
            try:
                step()
            finally:
                condition.acquire()


class HookedLock:
    """A lock that runs something once, just before it is taken (`blocking`: waited for): in the gap after a check."""

    def __init__(self, lock: Any, before: Callable[[], object], blocking: bool = False) -> None:
        self._lock, self._before, self._blocking = lock, [before], blocking

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Run the hook, then take the lock."""
        if self._before and blocking >= self._blocking:
            self._before.pop()()
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def start(function: Callable[[], object], name: str = "other") -> threading.Thread:
    """Run a function on a thread that cannot keep the tests from ending."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    """Join threads; one that does not end is a failure."""
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"{thread.name} does not end"


def elsewhere(function: Callable[[], Any]) -> Any:
    """Run a function on a thread of its own and return what it returns, or raise what it raises."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    join(start(call))
    if failure:
        raise failure[0]
    return outcome[0]


class FakeDist:
    """The last rank of a pipeline, which only sends; `make` builds the handle of the next isend."""

    pp_size, pp_rank, next_pp_rank = 4, 3, 0

    def __init__(self, make: Callable[[], Any] = FakeRequest) -> None:
        self.make = make
        self.sent: list[Any] = []

    def isend_object(self, value: object, dest: int, tag: int) -> Any:
        """Start a send."""
        self.sent.append(self.make())
        return self.sent[-1]


PATCHABLE = ("B/D", "C", "E2")
SLOTS = 8


def executor_class(era: str) -> type:
    """Return a fresh class of an era's shape, as little as that takes: see doubles for whole executors.

    `events` lists what happened, in order.
    """

    class PyExecutor:
        """The executor, with upstream's names."""

        def __init__(self, dist: Any = None) -> None:
            self.dist = FakeDist() if dist is None else dist
            self.num_micro_batches = SLOTS
            self.send_handles: list[Any] = [None] * SLOTS
            self.send_schedule_handles: list[Any] = [None] * SLOTS
            self.send_expected_batch_num_handles: list[Any] = [None] * SLOTS
            self.response_cv = threading.Condition()
            self.is_shutdown = False
            self.shutdown_event = threading.Event()
            self.events: list[object] = []

        def start_worker(self) -> None:
            """Make the queues, then start the relay thread."""
            self.executed_batch_queue: Any = queue.Queue(maxsize=SLOTS)
            self.executed_batch_response_queue: Any = queue.Queue(maxsize=-1)
            self.handler = threading.Thread(target=self._broadcast_sample_state_loop, daemon=True, name="relay")
            self.handler.start()

        def _broadcast_sample_state_loop(self) -> None:
            while (batch := self.executed_batch_queue.get()) is not None:
                self._ring_broadcast_sample_state(batch)

        def _ring_broadcast_sample_state(self, batch: int) -> None:
            self.executed_batch_response_queue.put(batch)
            self.wait_on_pp_send_handles(self.send_handles, batch)
            self.send_handles[batch] = self.dist.isend_object(("host", []), self.dist.next_pp_rank, 20003)

        def wait_on_pp_send_handles(self, send_handles: list[Any], microbatch_id: int) -> None:
            """Block until a slot's send is complete."""
            if send_handles[microbatch_id] is not None:
                self.events.append(("upstream wait", microbatch_id))
                send_handles[microbatch_id].wait()
                send_handles[microbatch_id] = None

        def _executor_loop_cleanup(self) -> None:
            with self.response_cv:
                self.is_shutdown = True
                self.response_cv.notify_all()
            self.shutdown_event.set()
            self.events.append("notified")
            for slot in range(self.num_micro_batches):
                for handles in (self.send_handles, self.send_schedule_handles, self.send_expected_batch_num_handles):
                    self.wait_on_pp_send_handles(handles, slot)

        def shutdown(self) -> None:
            """End the executor thread's part, then the relay thread's."""
            self._executor_loop_cleanup()
            self.executed_batch_queue.put(None)
            join(self.handler)

    if era == "C":

        def _broadcast_sample_state_loop(self: Any) -> None:
            while (batch := self.executed_batch_queue.get()) is not None:
                self._ring_broadcast_sample_state(batch)
                if self.executed_batch_queue.empty():
                    self.wait_on_pp_send_handles(self.send_handles, batch)

        PyExecutor._broadcast_sample_state_loop = _broadcast_sample_state_loop  # type: ignore[method-assign]
    elif era == "E2":
        plain = PyExecutor.__init__

        def __init__(self: Any, dist: Any = None) -> None:
            plain(self, dist)
            self._broadcast_mpi_comm = None

        PyExecutor.__init__ = __init__  # type: ignore[method-assign]
    return PyExecutor
