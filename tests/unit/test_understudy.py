"""The native understudy and its fallback against stand-ins for MPI: no MPI is needed here."""

import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import elsewhere

from trtllm_pp_progress import _understudy
from trtllm_pp_progress._parked import Parked
from trtllm_pp_progress._understudy import RECEIVING_SILENCES, Probe, Understudy, UnderstudyUnavailable

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0  # only a fault makes a wait reach it
FOR_EVER = 3600.0
SOON = 1e-4

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the native part needs a C compiler")


def compile_shared(source: Path, target: Path) -> Path:
    """Build one C file as a shared object, warnings being errors."""
    command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", target, source], check=True, timeout=60)
    return target


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Return a folder with the native part and the counting stand-in, both freshly built."""
    folder = tmp_path_factory.mktemp("native")
    compile_shared(ROOT / "trtllm_pp_progress/native/understudy.c", folder / "understudy.abi3.so")
    compile_shared(ROOT / "tests/native/counter.c", folder / "counter.so")
    return folder


@pytest.fixture
def counter(built, monkeypatch):
    """Return the counting stand-in for MPI_Iprobe, reset; the native part is loaded from the same folder."""
    monkeypatch.setattr(_understudy, "NATIVE", built)
    library = ctypes.CDLL(str(built / "counter.so"))
    words = {name: ctypes.c_int.in_dll(library, name) for name in ("calls", "blocked", "answer", "source", "tag")}
    for word in words.values():
        word.value = 0
    words["comm"] = ctypes.c_ssize_t.in_dll(library, "comm")
    holding = ctypes.PyDLL(str(built / "counter.so"))
    return SimpleNamespace(library=library, hold_gil=holding.hold, spin=holding.spin, **words)


def counting_probe(counter, pointer=True):
    """Return a probe of the stand-in with either kind of handle."""
    function = counter.library.iprobe_pointer if pointer else counter.library.iprobe_integer
    address = ctypes.cast(function, ctypes.c_void_p).value
    comm = 0x7FFF_1234_5678 if pointer else -0x4400_0000
    return Probe(address, comm, pointer, -2, 99)


@pytest.fixture
def understudy(counter):
    """Return a function that starts understudies; all of them are stopped at the end."""
    started = []

    def start(silence_s=SOON, period_s=SOON, **of_probe):
        started.append(Understudy(silence_s, period_s, counting_probe(counter, **of_probe)))
        return started[-1]

    yield start
    counter.blocked.value = 0
    assert all(one.stop(LIMIT_S) for one in started)


class LoopbackComm:
    """One private communicator: a receive blocks until a byte was sent, as on COMM_SELF."""

    def __init__(self):
        self.bytes, self.received, self.freed, self.gate = queue.SimpleQueue(), 0, 0, threading.Event()
        self.gate.set()

    def Recv(self, buffer, source, tag):
        """Block until a byte arrives; the gate can hold the thread back before that."""
        assert self.gate.wait(LIMIT_S)
        self.bytes.get()
        self.received += 1

    def Isend(self, byte, dest, tag):
        """Send one byte; the request can be freed."""
        self.bytes.put(byte)
        return SimpleNamespace(Free=lambda: None)

    def Free(self):
        """Count how often it is freed."""
        self.freed += 1


def native_threads():
    """Return the kernel's folders of the native threads of this process."""
    return [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "pp-understudy\n"]


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


# The contract both share


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "parked"])
def driver(request):
    """Return each kind of second driver in turn."""
    if request.param == "native":
        yield request.getfixturevalue("understudy")()
        return
    parked = Parked(comm=LoopbackComm())
    yield parked
    assert parked.stop(LIMIT_S)


def test_state_follows_the_driver(driver):
    """What status() shows is what the driver was told last."""
    assert driver.state == "idle"
    driver.driven()
    assert driver.state == "armed"
    until(lambda: driver.ticks > 0)
    driver.idle()
    assert driver.state == "idle"


def test_a_driver_in_a_receive_is_given_more_time(understudy):
    """It drives from there, and is back at work with its next drive; with nothing pending there is nothing to note."""
    one = understudy(silence_s=0.05)
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
def test_stop_can_be_repeated_and_late_calls_are_harmless(driver, armed):
    """A relay thread that outlives the executor may go on telling it of drives."""
    (driver.driven if armed else driver.idle)()
    assert driver.stop(LIMIT_S) is True
    for _ in range(3):
        driver.driven()
        driver.idle()
        assert driver.stop(0) is True
    assert driver.state == "stopped"


def in_child(act):
    """Fork, run `act` in the child, return its exit status: 0 if it returned true; killed by SIGALRM if it hangs."""
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        code = 1
        try:
            code = 0 if act() else 2
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_stays_off_and_says_so(driver):
    """The thread did not come along; nothing in the child waits for it, and the parent's goes on."""

    def act():
        driver.driven()
        driver.idle()
        return driver.stop(FOR_EVER) and driver.state == "off after fork"

    driver.driven()
    assert in_child(act) == 0
    before = driver.ticks
    driver.idle()
    driver.driven()
    until(lambda: driver.ticks > before)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_not_told_of_the_fork_would_wait_for_nobody(understudy):
    """Control of the test above: without the hook, stop() waits for a thread that is not there."""
    one = understudy()
    _understudy._live.discard(one)
    assert in_child(lambda: one.stop(0.01)) == 2 << 8


# The native thread


@needs_compiler
@pytest.mark.parametrize("pointer", [True, False])
def test_it_ticks_under_a_held_gil(understudy, counter, pointer):
    """The call that waits for the ticks holds the GIL, so no Python can have made them; both kinds of handle arrive."""
    one = understudy(pointer=pointer)
    one.driven()
    assert counter.hold_gil(3, int(LIMIT_S * 1e3)) >= 3
    assert (counter.source.value, counter.tag.value) == (-2, 99)
    assert counter.comm.value == counting_probe(counter, pointer).comm


@needs_compiler
def test_nothing_pending_means_no_call_and_no_wake_up(understudy, counter):
    """Over a window of 300 periods; while armed there are calls and wake-ups (control)."""
    one = understudy()
    until(sleeping)
    before = wake_ups()
    one.driven()
    assert counter.hold_gil(3, int(LIMIT_S * 1e3)) >= 3
    assert wake_ups() >= before + 3
    one.idle()
    until(sleeping)
    counter.hold_gil(1, 1)  # a timer that it had just set may fire once more
    before = wake_ups(), one.ticks
    assert counter.hold_gil(1, 30) == 0
    assert (wake_ups(), one.ticks) == before


@needs_compiler
def test_it_sleeps_while_the_driver_is_not_silent(understudy, counter):
    """Until the silence is over it makes no call, and it does not poll for that moment either."""
    one = understudy(silence_s=FOR_EVER)
    until(sleeping)
    before = wake_ups()
    one.driven()
    one.driven()
    assert counter.hold_gil(1, 30) == 0
    assert wake_ups() == before


@needs_compiler
def test_a_driver_that_runs_is_in_mpi_itself_and_gets_patience(understudy, counter):
    """While the driver spins, as a blocking receive does, the thread keeps out; once it sleeps, the thread steps in."""
    one = understudy(silence_s=0.2)
    one.driven()
    assert counter.spin(1, 300) == 0  # 1.5 times the silence, a fraction of the patience
    assert counter.hold_gil(1, int(LIMIT_S * 1e3)) >= 1


@needs_compiler
def test_a_lost_wake_up_is_repaired_by_the_next_drive(understudy, counter):
    """Staged: a send is noted as pending, but nobody wakes the thread."""
    one = understudy()
    until(sleeping)
    one._shared.driven_ns = time.monotonic_ns()
    assert counter.hold_gil(1, 30) == 0
    one.driven()
    assert counter.hold_gil(1, int(LIMIT_S * 1e3)) >= 1


@needs_compiler
def test_a_rest_undoes_a_store_that_came_late(understudy):
    """Staged: a poster looked whether the timer is set, lost the GIL, and stores after another thread's rest."""
    one = understudy(silence_s=FOR_EVER)
    one.driven()
    one.idle()
    one._shared.driven_ns = time.monotonic_ns()
    one.idle()
    assert one.state == "idle"


@needs_compiler
def test_who_drove_last_is_who_is_looked_at(understudy, counter):
    """One thread arms, another takes over and sleeps, the first computes: no patience, for it is not the driver."""
    one = understudy(silence_s=0.2)
    one.driven()
    elsewhere(one.driven)
    assert counter.spin(1, 1000) >= 1  # a tenth of the patience is 0.2 s


@needs_compiler
def test_stop_is_bounded_when_mpi_does_not_return(understudy, counter):
    """A thread stuck in MPI makes stop() say False; once MPI returns, stop() joins it."""
    one = understudy()
    counter.blocked.value = 1
    one.driven()
    until(lambda: counter.calls.value)
    assert one.stop(0.001) is False
    assert one.state == "armed"
    counter.blocked.value = 0
    assert one.stop(LIMIT_S) is True


@needs_compiler
def test_a_failing_iprobe_ends_it_and_is_told(understudy, counter):
    """It does not hammer a broken MPI."""
    counter.answer.value = 15
    one = understudy()
    one.driven()
    until(lambda: one._shared.error)
    assert one.state == "failed (MPI_Iprobe returned 15)"
    before = counter.calls.value
    one.driven()
    assert counter.hold_gil(1, 30) == 0
    assert counter.calls.value == before == 1


@needs_compiler
def test_two_executors_have_one_each(understudy, counter):
    """Stopping one leaves the other at work."""
    first, second = understudy(), understudy()
    assert first.stop(LIMIT_S)
    second.driven()
    assert counter.hold_gil(3, int(LIMIT_S * 1e3)) >= 3


@needs_compiler
def test_signals_are_left_to_the_main_thread(understudy):
    """Ctrl-C delivered to the native thread would not interrupt what the main thread waits in."""
    understudy()
    until(sleeping)
    tasks = native_threads()
    assert tasks
    for task in tasks:
        blocked = int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16)
        assert blocked >> (signal.SIGINT - 1) & 1
        assert blocked >> (signal.SIGTERM - 1) & 1


EXIT = """
import atexit, ctypes, pathlib, sys
from trtllm_pp_progress import _understudy
folder, mode, guarded = sys.argv[1:]
_understudy.NATIVE = pathlib.Path(folder)
counter = ctypes.CDLL(folder + "/counter.so")
ctypes.pythonapi.Py_AtExit(counter.after_python)
address = ctypes.cast(counter.iprobe_pointer, ctypes.c_void_p).value
one = _understudy.Understudy(1e-4, 1e-4, _understudy.Probe(address, 1, True, -2, 99))
one.driven()
if guarded == "no":
    atexit.unregister(one.stop)
if mode == "exception":
    raise ValueError("uncaught")
if mode == "sys.exit":
    sys.exit(3)
"""


def exits(built, mode, guarded="yes"):
    """Run the script above; return its exit code and how many calls came after Python."""
    command = [sys.executable, "-c", EXIT, built, mode, guarded]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return ended.returncode, int(ended.stdout.partition("late calls: ")[2])


@needs_compiler
@pytest.mark.parametrize(("mode", "code"), [("normal", 0), ("exception", 1), ("sys.exit", 3)])
def test_every_exit_stops_it_before_mpi_is_finalized(built, mode, code):
    """No call comes where mpi4py finalizes, and the exit code is kept."""
    assert exits(built, mode) == (code, 0)


@needs_compiler
def test_without_its_exit_hook_it_would_call_too_late(built):
    """Control of the test above."""
    assert exits(built, "normal", guarded="no")[1] > 0


# Refusals


@needs_compiler
def test_a_build_that_is_absent_broken_or_old_is_named(tmp_path, monkeypatch):
    """The reason goes to status() and doctor as it is."""
    monkeypatch.setattr(_understudy, "NATIVE", tmp_path)
    with pytest.raises(UnderstudyUnavailable, match="not built: no C compiler"):
        Understudy(SOON, SOON)
    (tmp_path / "understudy.abi3.so").write_text("no shared object")
    with pytest.raises(UnderstudyUnavailable, match="does not load"):
        Understudy(SOON, SOON)
    (tmp_path / "old.c").write_text("int understudy_version(void) { return 0; }")
    (tmp_path / "understudy.abi3.so").unlink()
    compile_shared(tmp_path / "old.c", tmp_path / "understudy.abi3.so")
    with pytest.raises(UnderstudyUnavailable, match="is version 0, this package needs 2: reinstall"):
        Understudy(SOON, SOON)


LEVELS = {f"THREAD_{name}": level for level, name in enumerate(_understudy.MPI_THREAD_LEVELS)}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"initialized": False}, "not initialized, or already finalized"),
        ({"finalized": True}, "not initialized, or already finalized"),
        ({"level": LEVELS["THREAD_SERIALIZED"]}, "needs THREAD_MULTIPLE, this MPI runs with SERIALIZED"),
        ({"level": LEVELS["THREAD_SINGLE"]}, "needs THREAD_MULTIPLE, this MPI runs with SINGLE"),
        ({"file": "/no/such/file"}, "cannot be found through /no/such/file"),
        ({"file": "libc.so.6"}, "MPI_Initialized"),
    ],
)
def test_an_mpi_that_a_second_thread_may_not_enter_is_refused(monkeypatch, facts, reason):
    """Before anything of ours touches it."""
    mpi = SimpleNamespace(
        Is_initialized=lambda: facts.get("initialized", True),
        Is_finalized=lambda: facts.get("finalized", False),
        Query_thread=lambda: facts.get("level", LEVELS["THREAD_MULTIPLE"]),
        COMM_SELF=None,
        __file__=facts.get("file", "libc.so.6"),
        **LEVELS,
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(UnderstudyUnavailable, match=reason):
        _understudy.mpi_probe()


def test_a_process_without_mpi_keeps_without_it(monkeypatch):
    """Importing mpi4py.MPI initialises MPI: not for us to do."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(UnderstudyUnavailable, match="mpi4py is not in use in this process"):
        _understudy.mpi_probe()
    assert "mpi4py.MPI" not in sys.modules


@needs_compiler
def test_a_libmpi_that_is_linked_but_not_in_use_is_refused(monkeypatch, tmp_path):
    """mpi4py linked to one MPI while another was preloaded: the linked one was never initialized."""
    source = "int MPI_Iprobe(void) { return 0; } int MPI_Initialized(int *flag) { return *flag = 0; }"
    (tmp_path / "libmpi.c").write_text(source)
    unused = compile_shared(tmp_path / "libmpi.c", tmp_path / "libmpi.so")
    mpi = SimpleNamespace(__file__=str(unused), COMM_WORLD=None)
    monkeypatch.setattr(_understudy, "usable_mpi", lambda: mpi)
    with pytest.raises(UnderstudyUnavailable, match="is not in use: is another preloaded"):
        _understudy.mpi_probe()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_from_an_mpi_process_starts_none(monkeypatch):
    """MPI is initialized in the child's memory, but it is the parent's."""
    mpi = SimpleNamespace(Is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)

    def act():
        with pytest.raises(UnderstudyUnavailable, match="forked from one that uses MPI"):
            _understudy.usable_mpi()
        return True

    assert in_child(act) == 0


# The parked thread


def test_a_parked_thread_that_comes_late_passes_straight_through():
    """Staged: three sends came and went before it reached its first receive; it ends asleep, not stuck."""
    comm = LoopbackComm()
    parked = Parked(0.001, comm=comm)
    comm.gate.clear()
    for _ in range(3):
        parked.driven()
        parked.idle()
    comm.gate.set()
    until(lambda: comm.received == 3)
    assert comm.bytes.empty()
    assert parked.stop(LIMIT_S) is True
    assert (parked.ticks, comm.freed) == (3, 1)


def test_the_first_drive_returns_once_the_thread_is_on_its_way():
    """Without that the executor would take the GIL before the thread is in place; later drives do not wait."""
    comm = LoopbackComm()
    parked = Parked(LIMIT_S, comm=comm)
    for turn in range(1, 4):
        parked.driven()
        assert parked.ticks == turn
        parked.driven()
        parked.idle()
    assert parked.stop(LIMIT_S) is True


def test_repeated_drives_park_it_once():
    """A drive while it is parked costs nothing and sends nothing."""
    comm = LoopbackComm()
    parked = Parked(comm=comm)
    for _ in range(5):
        parked.driven()
    until(lambda: parked.ticks == 1)
    parked.idle()
    parked.idle()
    assert parked.stop(LIMIT_S) is True
    assert (parked.ticks, comm.received) == (1, 1)


@pytest.mark.parametrize("armed", [True, False])
def test_a_send_posted_while_it_is_stopped_parks_nobody(armed):
    """Between the release and the order to leave: the thread would stay in MPI for want of a second release."""
    comm = LoopbackComm()
    parked = Parked(comm=comm)
    if armed:
        parked.driven()
        until(lambda: parked.ticks == 1)
    orders = parked._orders

    def put(order):
        if order is False:
            elsewhere(parked.driven)
        orders.put(order)

    parked._orders = SimpleNamespace(put=put, get=orders.get)
    assert parked.stop(0.5) is True
    assert (comm.received, comm.freed) == (armed, 1)


def test_threads_that_stop_it_together_free_its_communicator_once():
    """The relay thread at its end, and the exit hook."""
    comm = LoopbackComm()
    parked = Parked(comm=comm)
    join = parked._thread.join
    parked._thread.join = lambda timeout: (join(timeout), setattr(parked._thread, "join", join), elsewhere(parked.stop))
    assert parked.stop(LIMIT_S) is True
    assert comm.freed == 1


def test_a_parked_thread_that_cannot_be_released_is_told():
    """stop() is bounded although its receive never completes."""
    comm = LoopbackComm()
    comm.gate.clear()
    parked = Parked(comm=comm)
    parked.driven()
    until(lambda: parked.ticks == 1)
    assert parked.stop(0.001) is False
    comm.gate.set()
    assert parked.stop(LIMIT_S) is True


def test_a_failing_receive_ends_it_and_is_told():
    """A broken MPI shows in status(), not as a traceback of a thread nobody knows."""
    comm = LoopbackComm()
    comm.Recv = lambda *_, **__: 1 / 0
    parked = Parked(comm=comm)
    parked.driven()
    until(lambda: parked.state == "failed (division by zero)")
    assert parked.stop(LIMIT_S) is True
