"""Era H's progress pump (NVIDIA/TensorRT-LLM#19643), which ticks while the relay thread idles, and era I's thread."""

import math
import os
import queue
import sys
import threading

from doubles.world import PPCommTag

VARIABLE = "TLLM_PP_MPI_PROGRESS_POLL_MS"
DEFAULT_MS, SHORTEST_MS, LONGEST_MS = 5.0, 0.5, 1000.0


def resolve_mpi_progress_poll_interval_ms():
    """Return the period that the environment asks for; at most 0 means off."""
    try:
        asked = float(os.environ.get(VARIABLE, DEFAULT_MS))
    except ValueError:
        asked = math.nan
    if not math.isfinite(asked):
        return DEFAULT_MS
    return asked if asked <= 0 else min(max(asked, SHORTEST_MS), LONGEST_MS)


def make_mpi_progress_pump(comm, stop_event, quiesced_event):
    """Return (pump, period in seconds), or None where there is to be none; pump() is true while it may be called."""
    period_ms = resolve_mpi_progress_poll_interval_ms()
    mpi = sys.modules.get("mpi4py.MPI")
    if period_ms <= 0 or mpi is None or mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return None

    def pump():
        if stop_event.is_set() or mpi.Is_finalized():
            quiesced_event.set()
            return False
        comm.Iprobe(source=mpi.ANY_SOURCE, tag=PPCommTag.MPI_PROGRESS_PROBE)
        return True

    return pump, period_ms / 1000


def make_mpi_progress_exit_hook(stop_event, quiesced_event, poll_interval_s):
    """Return what stops the pump before MPI is finalized, and waits a while for it."""

    def retire():
        stop_event.set()
        quiesced_event.wait(min(max(20 * poll_interval_s, 0.1), 1.0))

    return retire


def get_with_mpi_progress(relay_queue, progress, stop_event):
    """Return the next item; without a pump by a plain get."""
    if progress is None:
        return relay_queue.get()
    pump, period_s = progress
    while True:
        try:
            return relay_queue.get(timeout=period_s)
        except queue.Empty:
            if not pump():
                stop_event.set()


INTERVAL_VARIABLE, DEFAULT_INTERVAL_US = "DOUBLE_PP_MPI_PROGRESS_INTERVAL_US", 1000  # upstream's were not seen


def _resolve_pp_mpi_progress_interval_us():
    """Return the interval that the environment asks for; at most 0 means off."""
    try:
        return int(os.environ.get(INTERVAL_VARIABLE, DEFAULT_INTERVAL_US))
    except ValueError:
        return DEFAULT_INTERVAL_US


class MpiProgressThread:
    """Enters MPI at a fixed interval until it is stopped; upstream's is native and needs no GIL, this one does."""

    def __init__(self, comm, interval_us, tag):
        if interval_us <= 0:
            raise ValueError(f"interval_us must be positive, not {interval_us}")
        self.num_probes = 0
        self._comm, self._interval_s, self._tag = sys.modules["mpi4py.MPI"].Comm.f2py(comm), interval_us / 1e6, tag
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._end.wait(self._interval_s):
            self._comm.Iprobe(source=sys.modules["mpi4py.MPI"].ANY_SOURCE, tag=int(self._tag))
            self.num_probes += 1

    @property
    def is_running(self):
        """Whether it goes on."""
        return self._thread.is_alive()

    def stop(self):
        """End it; harmless when repeated."""
        self._end.set()
        self._thread.join()
