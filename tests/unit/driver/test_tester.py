"""Tests of a send from C: when they end, what they answer, and that they need no GIL."""

import ctypes
import threading
import time

import pytest
from fakes import join, start
from native_parts import LIMIT_S, CountedRequest, MpiError, build, needs_compiler

from trtllm_pp_progress.driver import library as _library
from trtllm_pp_progress.driver import tester as _tester
from trtllm_pp_progress.driver.library import MOST_REQUESTS, DriverUnavailableError
from trtllm_pp_progress.driver.tester import AS_LONG_AS_IT_TAKES, NativeTester

FOR_EVER = 3600.0
NEVER = 1_000_000_000

pytestmark = needs_compiler


@pytest.fixture
def tester(counter, fake_mpi, monkeypatch):
    """Return a tester whose MPI_Test is the stand-in's."""
    fake_mpi()
    monkeypatch.setattr(_tester, "mpi_calls", counter.mpi_calls)
    return NativeTester()


@pytest.fixture
def native(tester):
    """Return a test of its own."""
    return tester.new()


def test_a_send_is_complete_once_all_its_requests_are(native):
    """The others are not asked before the first one is complete, as pkl5's are."""
    send = first, second = CountedRequest(left=3), CountedRequest(left=2)
    assert native(send, 2, FOR_EVER) is False
    assert (native.used, first.tests, second.tests) == (2, 2, 0)
    assert native(send, AS_LONG_AS_IT_TAKES, FOR_EVER) is True
    assert (native.used, first.tests, second.tests) == (2, 4, 2)


def test_one_send_after_the_other(native):
    """Nothing of one is left when the next one is tested, however many messages each has."""
    long, short = tuple(CountedRequest(left=1) for _ in range(3)), (CountedRequest(left=2),)
    assert native(long, 1, FOR_EVER) is True
    assert native(short, 1, FOR_EVER) is False
    assert native(short, 1, FOR_EVER) is True
    assert [request.tests for request in (*long, *short)] == [1, 1, 1, 2]


def test_one_call_makes_as_many_tests_as_it_is_given(native):
    """Or it ends with the first that is complete."""
    send = (CountedRequest(left=100),)
    for rounds in (1, 7, 41):
        assert native(send, rounds, FOR_EVER) is False
        assert native.used == rounds
    assert native(send, 1000, FOR_EVER) is True
    assert send[0].tests == 100


def test_one_call_lasts_no_longer_than_it_may(native):
    """With no time at all it tests once, for a test is what makes progress."""
    send = (CountedRequest(left=NEVER),)
    assert native(send, AS_LONG_AS_IT_TAKES, 0.0) is False
    assert native.used == 1
    assert native(send, AS_LONG_AS_IT_TAKES, 0.01) is False
    assert 1 < native.used < NEVER


def test_a_word_that_is_set_ends_it(native):
    """A batch that comes in ends the tests after the one that is on its way; a send that is complete is complete."""
    stop = ctypes.c_int64(0)
    word = ctypes.addressof(stop)
    send = (CountedRequest(left=NEVER, stop=word),)
    assert native(send, 1000, FOR_EVER, word) is False
    assert (native.used, stop.value) == (1, 1)
    assert native(send, 1000, FOR_EVER, word) is False
    assert native.used == 1
    assert native(send, 1000, FOR_EVER) is False
    assert native.used == 1000, "without the word nothing ends it (control)"
    send[0].left = 1
    assert native(send, 1000, FOR_EVER, word) is True


def test_an_error_of_mpi_is_raised_as_mpi4py_does(native):
    """At once, and what comes after the broken request is not asked; the next send knows nothing of it."""
    send = broken, after = CountedRequest(left=1, error=15), CountedRequest(left=1)
    with pytest.raises(MpiError) as raised:
        native(send, 10, FOR_EVER)
    assert raised.value.args == (15,)
    assert (native.used, after.tests) == (1, 0)
    broken.error = 0
    assert native(send, 10, FOR_EVER) is True


def test_what_it_cannot_test_is_left_to_python(tester, native):
    """More requests than the struct has room for, none at all, and what is no send of mpi4py's."""
    requests = tuple(CountedRequest(left=1) for _ in range(MOST_REQUESTS + 1))
    assert MOST_REQUESTS == 8
    assert not tester.takes(requests)
    assert not tester.takes(())
    assert not tester.takes((requests[0], object()))
    assert not tester.takes(list(requests[:1]))
    assert not tester.takes(requests[0])
    assert tester.takes(requests[:-1])
    assert native(requests[:-1], 1, FOR_EVER) is True
    assert [request.tests for request in requests] == [1] * MOST_REQUESTS + [0]


def test_other_threads_run_meanwhile(native):
    """It holds no GIL, or the thread that ends it here could not."""
    stop, begun = ctypes.c_int64(0), threading.Event()

    def end():
        begun.wait(LIMIT_S)
        stop.value = 1

    thread, started = start(end), time.monotonic()
    begun.set()
    assert native((CountedRequest(left=NEVER),), AS_LONG_AS_IT_TAKES, LIMIT_S, ctypes.addressof(stop)) is False
    assert time.monotonic() - started < LIMIT_S
    assert stop.value == 1
    join(thread)


def still_once(native, send):
    """Tell whether a few tests ever move nothing; a machine that is busy makes a quick call long now and then."""
    return any(not native(send, 3, FOR_EVER) and not native.moved for _ in range(300))


def test_it_tells_whether_data_moved(native):
    """A test that takes long has moved some; one that does not has not."""
    assert native((CountedRequest(left=NEVER, us=20),), 3, FOR_EVER) is False
    assert native.moved is True
    assert still_once(native, (CountedRequest(left=NEVER),))


@pytest.mark.parametrize("counts", [False, True])
def test_what_others_do_while_it_yields_is_no_progress(tmp_path, monkeypatch, fake_mpi, counter, counts):
    """Staged: where threads share cores a yield may last, here 1 ms each time; counted it looks like data (control)."""
    changes = {"sched_yield();": "nanosleep(&(struct timespec){0, 1000000}, 0);"}
    if counts:
        changes["before = t->yields ? now_ns() : now;"] = "before = now;"
    fake_mpi()
    monkeypatch.setattr(_library, "NATIVE", build(tmp_path, changes))
    monkeypatch.setattr(_tester, "mpi_calls", counter.mpi_calls)
    native = NativeTester(yields=True).new()
    assert still_once(native, (CountedRequest(left=NEVER),)) is not counts
    assert native.used == 3


def test_without_a_native_part_there_is_none(tmp_path, monkeypatch):
    """The same error as the driver's."""
    monkeypatch.setattr(_library, "NATIVE", tmp_path)
    with pytest.raises(DriverUnavailableError, match="not built"):
        NativeTester()
