"""One process that ends in one way while a second driver is armed; prints what the end found. See exits.py.

Usage: exit_once.py FOLDER KIND MODE GUARDED, with FOLDER holding the built native parts.
"""

import atexit
import ctypes
import dataclasses
import pathlib
import sys
import threading

folder, kind, mode, guarded = sys.argv[1:]
counter = ctypes.CDLL(folder + "/counter.so")
ctypes.pythonapi.Py_AtExit(counter.after_python)  # the first in is the last out: runs once mpi4py has finalized MPI

from mpi4py import MPI  # noqa: E402

from trtllm_pp_progress import _understudy  # noqa: E402
from trtllm_pp_progress._parked import Parked  # noqa: E402

_understudy.NATIVE = pathlib.Path(folder)


def counted(probe: _understudy.Probe) -> _understudy.Probe:
    """Put the counter in front of MPI_Iprobe."""
    name = "pointer" if probe.comm_is_pointer else "integer"
    ctypes.c_void_p.in_dll(counter, f"real_{name}").value = probe.function
    function = ctypes.cast(getattr(counter, f"iprobe_{name}"), ctypes.c_void_p).value
    return dataclasses.replace(probe, function=function)


def start():
    """Return a second driver of the kind asked for, at work."""
    native = kind == "native"
    driver = _understudy.Understudy(1e-4, 1e-4, counted(_understudy.mpi_probe())) if native else Parked()
    driver.driven()
    while not driver.ticks:
        pass
    return driver


def report():
    """Say how the driver was found where mpi4py is about to finalize MPI."""
    print("state:", driver.state, flush=True)


atexit.register(report)  # before the driver's own hook, so it runs after that
driver = start()
if guarded == "no":
    atexit.unregister(driver.stop)
if mode == "exception":
    raise ValueError("uncaught")
if mode == "sys.exit":
    sys.exit(3)
if mode == "finalize":
    MPI.Finalize()
    driver.driven()
    driver.idle()
if mode == "thread":  # a thread that exit waits for, and that goes on driving after the main thread has ended
    main = threading.main_thread()
    threading.Thread(target=lambda: (main.join(), driver.driven(), driver.idle(), driver.driven())).start()
