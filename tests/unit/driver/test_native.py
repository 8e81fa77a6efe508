"""The native driver against a counting stand-in for MPI: when it steps in, when it keeps out, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from threading import get_ident

import pytest
from fakes import elsewhere
from native_parts import LIMIT_MS, LIMIT_S, ROOT, build, native_threads, needs_compiler

from trtllm_pp_progress.driver import library as _library
from trtllm_pp_progress.driver import native as _native
from trtllm_pp_progress.driver.native import RECEIVING_SILENCES

FOR_EVER = 3600.0
SOON = 1e-4
AWAY_S = 100.0

pytestmark = needs_compiler


def sleeping():
    """Tell whether there is a native thread, and all of them sleep."""
    states = [(task / "status").read_text().split("\nState:\t")[1][0] for task in native_threads()]
    return set(states) == {"S"}


def wake_ups():
    """Return how often the kernel has put a native thread to sleep: once for each time it woke before."""
    texts = [(task / "status").read_text() for task in native_threads()]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)


def until(fact):
    """Wait until `fact()` holds; only a fault reaches the limit."""
    limit = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < limit, "never came true"
        os.sched_yield()


# What it is told, and what it says


def test_state_follows_the_driver(start_native):
    """What status() shows is what the driver was told last."""
    driver = start_native()
    assert driver.state == "idle"
    driver.driven()
    assert driver.state == "armed"
    until(lambda: driver.ticks > 0)
    driver.idle()
    assert driver.state == "idle"
    assert driver.runs


def test_a_driver_in_a_receive_is_given_more_time(start_native):
    """It drives from there, and is back at work with its next drive; with nothing pending there is nothing to note."""
    one = start_native(silence_s=0.05)
    one.receiving()
    assert (one.state, one.ticks) == ("idle", 0)
    one.driven()
    one.receiving()
    ahead_s = (one._shared.driven_ns - time.monotonic_ns()) * 1e-9
    assert 0 < ahead_s <= RECEIVING_SILENCES * 0.05
    one.driven()
    assert one._shared.driven_ns <= time.monotonic_ns()
    until(lambda: one.ticks > 0)


@pytest.mark.parametrize("armed", [True, False])
def test_stop_can_be_repeated_and_late_calls_are_harmless(start_native, counter, armed):
    """A relay thread that outlives the executor may go on telling it of drives."""
    driver = start_native()
    (driver.driven if armed else driver.idle)()
    assert driver.stop(LIMIT_S) is True
    before = counter.calls.value
    for _ in range(3):
        driver.driven()
        driver.driven(planned_s=SOON)
        driver.receiving()
        driver.idle()
        assert driver.stop(0) is True
    assert driver.state == "stopped"
    assert not driver.runs
    assert counter.hold_gil(1, 30) == 0
    assert counter.calls.value == before


def test_a_stop_that_does_not_wait_is_a_stop(start_native):
    """Its thread leaves when it can, and it counts as none from now on: another life starts another one."""
    driver = start_native()
    driver.stop(0)
    assert not driver.runs
    until(lambda: driver.state == "stopped")
    assert driver.stop(LIMIT_S) is True


# Forks


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_stays_off_and_says_so(start_native, in_child):
    """The thread did not come along; nothing in the child waits for it, and the parent's goes on."""
    driver = start_native()

    def act():
        driver.driven()
        driver.idle()
        return driver.stop(FOR_EVER) and driver.state == "off after fork" and not driver.runs

    driver.driven()
    assert in_child(act) == 0
    before = driver.ticks
    driver.idle()
    driver.driven()
    until(lambda: driver.ticks > before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_not_told_of_the_fork_would_wait_for_nobody(start_native, in_child):
    """Control of the test above: without the hook, stop() waits for a thread that is not there."""
    one = start_native()
    _native._live.discard(one)
    assert in_child(lambda: one.stop(0.01)) == 2 << 8


# When it steps in


@pytest.mark.parametrize("pointer", [True, False])
def test_it_ticks_under_a_held_gil(start_native, counter, pointer):
    """The call that waits for the ticks holds the GIL, so no Python can have made them; both kinds of handle arrive."""
    one = start_native(pointer=pointer)
    one.driven()
    assert counter.hold_gil(3, LIMIT_MS) >= 3
    assert (counter.source.value, counter.tag.value) == (-2, 99)
    assert counter.comm.value == counter.mpi_calls(pointer).comm


def test_nothing_pending_means_no_call_and_no_wake_up(start_native, counter):
    """Over a window of 300 periods; while armed there are calls and wake-ups (control)."""
    one = start_native()
    until(sleeping)
    before = wake_ups()
    one.driven()
    assert counter.hold_gil(3, LIMIT_MS) >= 3
    assert wake_ups() >= before + 3
    one.idle()
    until(sleeping)
    counter.hold_gil(1, 1)  # a timer that it had just set may fire once more
    before = wake_ups(), one.ticks
    assert counter.hold_gil(1, 30) == 0
    assert (wake_ups(), one.ticks) == before


def test_it_sleeps_while_the_driver_is_not_silent(start_native, counter):
    """Until the silence is over it makes no call, and it does not poll for that moment either."""
    one = start_native(silence_s=FOR_EVER)
    until(sleeping)
    before = wake_ups()
    one.driven()
    one.driven()
    assert counter.hold_gil(1, 30) == 0
    assert wake_ups() == before


def test_a_pause_that_was_announced_is_no_silence(start_native, counter):
    """The silence begins at its end: until then no call and no wake-up, and then it steps in."""
    one = start_native()
    until(sleeping)
    before = wake_ups()
    one.driven(planned_s=FOR_EVER)
    assert one.state == "armed"
    assert counter.hold_gil(1, 30) == 0
    assert wake_ups() == before
    one.idle()
    one.driven(planned_s=0.02)
    planned = one._shared.driven_ns
    assert counter.hold_gil(1, LIMIT_MS) >= 1
    assert time.monotonic_ns() > planned


@pytest.mark.parametrize("told", [lambda one: one.driven(), lambda one: elsewhere(one.driven)])
def test_a_pause_that_is_cut_short_leaves_no_timer_behind(start_native, counter, told):
    """A batch comes in: silence counts from the drive that is made then, in this thread or in another."""
    one = start_native()
    one.driven(planned_s=FOR_EVER)
    told(one)
    assert counter.hold_gil(1, LIMIT_MS) >= 1


def test_drives_that_follow_one_another_set_no_timer(start_native, monkeypatch):
    """They store a word, a later one each time; the timer is set by the first of a thread."""
    one, armed = start_native(silence_s=FOR_EVER), []
    arm = one._library.arm
    monkeypatch.setattr(one._library, "arm", lambda *told: (armed.append(told), arm(*told)))
    for planned_s in (0.0, 0.0, 0.1, 0.2):
        one.driven(planned_s)
    assert len(armed) == 1
    one.driven()
    assert len(armed) == 2, "sooner than what was announced (control)"


def test_a_driver_that_runs_is_in_mpi_itself_and_gets_patience(start_native, counter):
    """While the driver spins, as a blocking receive does, the thread keeps out; once it sleeps, the thread steps in.

    stress.c shows the same without a core to spin on.
    """
    one, limit = start_native(silence_s=0.2), time.monotonic() + LIMIT_S
    while True:
        if time.monotonic() > limit:
            pytest.skip("no core to spin on for a third of a second")
        one.driven()
        ran, started = time.thread_time(), time.monotonic()
        calls = counter.spin(1, 300)  # 1.5 times the silence, a fraction of the patience
        if time.thread_time() - ran > 0.6 * (time.monotonic() - started):
            break
    assert calls == 0
    assert counter.hold_gil(1, LIMIT_MS) >= 1


def test_a_lost_wake_up_is_repaired_by_the_next_drive(start_native, counter):
    """Staged: a send is noted as pending, but nobody wakes the thread."""
    one = start_native()
    until(sleeping)
    one._shared.driven_ns = time.monotonic_ns()
    assert counter.hold_gil(1, 30) == 0
    one.driven()
    assert counter.hold_gil(1, LIMIT_MS) >= 1


def test_a_rest_undoes_a_store_that_came_late(start_native):
    """Staged: a poster looked whether the timer is set, lost the GIL, and stores after another thread's rest."""
    one = start_native(silence_s=FOR_EVER)
    one.driven()
    one.idle()
    one._shared.driven_ns = time.monotonic_ns()
    one.idle()
    assert one.state == "idle"


def test_who_drove_last_is_who_is_looked_at(start_native, counter):
    """One thread arms, another takes over and sleeps, the first computes: no patience, for it is not the driver."""
    one = start_native(silence_s=0.2)
    one.driven()
    elsewhere(one.driven)
    assert counter.spin(1, 1000) >= 1  # a tenth of the patience is 0.2 s


# Where it lingers: a running ring takes no system call to tell it of a send


def asleep(one):
    """Tell whether it has gone to sleep until it is told."""
    return not one._shared.timed


def test_it_lingers_for_a_while_without_entering_mpi(start_native, counter):
    """Told of a send meanwhile it steps in, without a system call of who drives; later it sleeps without waking."""
    one = start_native(lingers=True)
    one.driven()
    assert counter.hold_gil(1, LIMIT_MS) >= 1
    one.idle()
    assert one.state == "idle"
    until(lambda: asleep(one))
    until(sleeping)
    before = wake_ups(), one.ticks
    assert counter.hold_gil(1, 30) == 0
    assert (wake_ups(), one.ticks) == before
    one.driven()
    assert counter.hold_gil(1, LIMIT_MS) >= 1


@pytest.mark.parametrize("lingers", [True, False])
def test_a_send_soon_after_another_is_told_without_a_system_call(start_native, monkeypatch, lingers):
    """Neither end of it takes one while the thread lingers; else each does (control)."""
    one, called = start_native(silence_s=FOR_EVER, lingers=lingers), []
    arm, rest = one._library.arm, one._library.rest
    monkeypatch.setattr(one._library, "arm", lambda *told: (called.append("arm"), arm(*told)))
    monkeypatch.setattr(one._library, "rest", lambda *told: (called.append("rest"), rest(*told)))
    one.driven()
    for _ in range(3):
        one.idle()
        one.driven()
    assert called == (["arm"] if lingers else ["arm"] + ["rest", "arm"] * 3)


@pytest.mark.parametrize("looks_again", [True, False])
def test_a_send_in_the_moment_it_goes_to_sleep_is_seen(tmp_path, monkeypatch, start_native, counter, looks_again):
    """Staged: it is told just before it unsets `timed`, and only another look at the sends saves it (control)."""
    held = "u->ticks = -1; while (u->ticks < 0 && !u->stopping) sched_yield(); u->timed = 0;"
    changes = {"                u->timed = 0;": held}
    if not looks_again:
        changes["if (u->driven_ns) { /* stored by somebody who saw `timed` */"] = "if (0) {"
    monkeypatch.setattr(_library, "NATIVE", build(tmp_path, changes))
    one = start_native(lingers=True)
    until(lambda: one.ticks < 0)
    one._shared.timed, one._armed_by = 1, get_ident()  # as after a send
    one.driven()
    one._shared.ticks = 0
    assert (counter.hold_gil(1, LIMIT_MS if looks_again else 50) >= 1) is looks_again


# How often


def receiver_stays_away(one):
    """Stage that a send is pending and nobody has driven for AWAY_S."""
    one._library.arm(one._address, -int(AWAY_S * 1e9))


def test_it_looks_less_often_for_a_receiver_that_stays_away(start_native, counter):
    """Every 20 ms at most, whatever the period; right after a drive every 100 us (control)."""
    one = start_native()
    receiver_stays_away(one)
    assert counter.hold_gil(15, LIMIT_MS) >= 15, "two per cent of the time would be 2 s and more each time"
    assert counter.hold_gil(1000, 300) <= 50
    one.idle()
    counts = []
    for _ in range(20):
        one.driven()
        counts.append(counter.hold_gil(1000, 15))
    assert max(counts) > 3


def test_while_data_moves_it_comes_back_at_once(start_native, counter):
    """A call that took long has moved some: neither the period nor the time since the last drive counts then."""
    one = start_native(period_s=1.5 * LIMIT_S)
    counter.busy_us.value = 20
    receiver_stays_away(one)
    assert counter.hold_gil(10, LIMIT_MS) >= 10
    counter.busy_us.value = 0  # control: nothing moves any more
    counter.hold_gil(1, 30)
    assert counter.hold_gil(10, 100) < 10


# Faults


def test_stop_is_bounded_when_mpi_does_not_return(start_native, counter):
    """A thread stuck in MPI makes stop() say False; once MPI returns, it leaves."""
    one = start_native()
    counter.blocked.value = 1
    one.driven()
    until(lambda: counter.calls.value)
    assert one.stop(0.001) is False
    assert one.state == "stopping"
    counter.blocked.value = 0
    assert one.stop(LIMIT_S) is True
    assert one.state == "stopped"


def test_a_failing_iprobe_ends_it_and_is_told(start_native, counter):
    """It does not hammer a broken MPI, and it counts as none."""
    counter.answer.value = 15
    one = start_native()
    assert one.runs
    one.driven()
    until(lambda: one._shared.error)
    assert one.state == "failed (MPI_Iprobe returned 15)"
    assert not one.runs
    before = counter.calls.value
    one.driven()
    assert counter.hold_gil(1, 30) == 0
    assert counter.calls.value == before == 1
    assert one.stop(LIMIT_S) is True
    assert one.state == "failed (MPI_Iprobe returned 15)"


def test_two_executors_have_one_each(start_native, counter):
    """Stopping one leaves the other at work."""
    first, second = start_native(), start_native()
    assert first.stop(LIMIT_S)
    second.driven()
    assert counter.hold_gil(3, LIMIT_MS) >= 3


def test_signals_are_left_to_the_main_thread(start_native):
    """Ctrl-C delivered to the native thread would not interrupt what the main thread waits in."""
    start_native()
    until(sleeping)
    tasks = native_threads()
    assert tasks
    for task in tasks:
        blocked = int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16)
        assert blocked >> (signal.SIGINT - 1) & 1
        assert blocked >> (signal.SIGTERM - 1) & 1


# The end of a process in which MPI is never finalized

PRELUDE = """
import ctypes, os, pathlib, signal, sys
from native_parts import Counter
from trtllm_pp_progress.driver import library as _library
from trtllm_pp_progress.driver.native import NativeDriver
folder = pathlib.Path(sys.argv[1])
counter = Counter(folder)  # loaded first, so it is taken down last
_library.NATIVE = folder
one = NativeDriver(1e-4, 1e-4, counter.mpi_calls())
ctypes.c_void_p.in_dll(counter.library, "left").value = ctypes.addressof(one._shared) + type(one._shared).done.offset
ctypes.c_int.in_dll(counter.library, "watch_the_end").value = 1
one.driven()
while not one.ticks:
    pass
"""
ENDS = {"": 0, "raise ValueError('uncaught')": 1, "sys.exit(3)": 3}
FATAL = """
signal.alarm(5)
counter.fatal.value = 7
while True:
    pass
"""
PATIENT = {"#define EXIT_TIMEOUT_NS 2000000000": "#define EXIT_TIMEOUT_NS 60000000000"}  # far beyond every alarm
BLOCKED_CHILD = """
counter.blocked.value = 1
while one._shared.ticks == counter.calls.value:
    pass
child = os.fork() if sys.argv[2] == "child" else 0
if child:
    counter.blocked.value = 0
    status = os.waitpid(child, 0)[1]
    os._exit(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
signal.alarm(5)
sys.exit(7)
"""


def end(folder, code, *arguments):
    """Run a process in which a driver is at work, to its end; return its exit code and what it said."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests/support"), str(ROOT)])}
    command = [sys.executable, "-c", PRELUDE + code, folder, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("code", ENDS)
def test_it_leaves_before_libraries_are_taken_down(built, code):
    """Whatever ends the process, and the exit code is kept."""
    rc, said = end(built, code)
    assert rc == ENDS[code]
    assert "late calls: 0, left: 1\n" in said


def test_without_its_exit_handler_it_would_go_on(tmp_path):
    """Control of the test above: the thread is still at work where libraries are taken down."""
    _, said = end(build(tmp_path, {"        atexit(stop_all);": ""}), "")
    assert "left: 0\n" in said
    assert "late calls: 0," not in said


@pytest.mark.parametrize(("who", "rc"), [("child", 7), ("parent", -signal.SIGALRM)])
def test_a_forked_child_ends_without_waiting(tmp_path, who, rc):
    """Nothing of the parent's is waited for at its exit; the process that has the thread, stuck in MPI, does wait.

    So long, here, that its alarm ends it (control).
    """
    assert end(build(tmp_path, PATIENT), BLOCKED_CHILD, who)[0] == rc


@pytest.mark.parametrize(("changes", "rc"), [({}, 7), ({"        if (u != own)": "        if (u)"}, -signal.SIGALRM)])
def test_an_error_of_mpi_that_ends_the_process_ends_it(tmp_path, changes, rc):
    """The thread that is in MPI then runs the exit handler itself, and must not wait for itself (control)."""
    assert end(build(tmp_path, PATIENT | changes), FATAL)[0] == rc
