"""One process that ends in one way while a native driver is at work; prints what the end found. See exits.py.

Usage: exit_once.py FOLDER MODE announced|unannounced, with FOLDER holding the built native parts.
"""

import atexit
import ctypes
import dataclasses
import os
import pathlib
import signal
import sys
import threading

folder, mode, announced = sys.argv[1:]
counter = ctypes.CDLL(folder + "/counter.so")
ctypes.pythonapi.Py_AtExit(counter.after_python)  # the first in is the last out: runs once mpi4py has finalized MPI

import mpi4py  # noqa: E402

mpi4py.rc.finalize = mode not in ("in C", "never", "fork")
from mpi4py import MPI  # noqa: E402

from trtllm_pp_progress.driver import library as _library  # noqa: E402
from trtllm_pp_progress.driver.library import MpiCalls, mpi_calls  # noqa: E402
from trtllm_pp_progress.driver.native import NativeDriver  # noqa: E402

_library.NATIVE = pathlib.Path(folder)
_library._stopped_at_finalize = announced == "unannounced"  # then the callback is taken for registered


def counted(calls: MpiCalls) -> MpiCalls:
    """Put the counter in front of MPI_Iprobe."""
    name = "pointer" if calls.comm_is_pointer else "integer"
    ctypes.c_void_p.in_dll(counter, f"real_{name}").value = calls.iprobe
    function = ctypes.cast(getattr(counter, f"iprobe_{name}"), ctypes.c_void_p).value
    return dataclasses.replace(calls, iprobe=function)


def start() -> NativeDriver:
    """Return a driver at work, whose last word the counter will look at."""
    driver = NativeDriver(1e-4, 1e-4, counted(mpi_calls()))
    word = ctypes.addressof(driver._shared) + type(driver._shared).done.offset
    ctypes.c_void_p.in_dll(counter, "left").value = word
    driver.driven()
    while not driver.ticks:
        pass
    return driver


def report() -> None:
    """Say how the driver is found at the end of Python."""
    print("state:", driver.state, flush=True)


def end_in_a_child() -> None:
    """End a forked child, which nobody's thread keeps; it is killed if it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        sys.exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(9)


driver = start()
atexit.register(report)
if mode == "exception":
    raise ValueError("uncaught")
if mode == "sys.exit":
    sys.exit(3)
if mode == "by hand":
    MPI.Finalize()
    driver.driven()
    driver.idle()
if mode == "in C":  # a program whose main is not Python's
    ctypes.CDLL(MPI.__file__).MPI_Finalize()
if mode == "never":
    ctypes.c_int.in_dll(counter, "watch_the_end").value = 1
if mode == "thread":  # a thread that exit waits for, and that goes on driving after the main thread has ended
    main = threading.main_thread()
    threading.Thread(target=lambda: (main.join(), driver.driven(), driver.idle(), driver.driven())).start()
if mode == "fork":
    end_in_a_child()
    MPI.Finalize()
