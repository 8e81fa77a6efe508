"""One life of an executor over a real MPI: built, used, ended, and all that it sent received in the end."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from doubles import MPIDist, Request, executor_class, set_mpi_comm
from doubles.world import PPCommTag, mpi_comm
from mpi4py.util import pkl5
from outside import Line

import trtllm_pp_progress
from soak.situation import Situation
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.tools.host import RingStage, Sampled

__all__ = ["Life"]

COMPUTE_S = 0.0002
HELD_EVERY_S = 0.03
LIMIT_S = 60.0  # only a fault makes a wait reach it
ASYNC = "TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE"

_usleep = ctypes.PyDLL(None).usleep


class Communicator(pkl5.Intracomm):
    """A communicator that knows its duplicates: upstream's relay threads make some, and never free them."""

    made: ClassVar[list[Any]] = []

    def Dup(self, info: Any = None) -> Communicator:
        """Duplicate it."""
        duplicate = super().Dup() if info is None else super().Dup(info)
        self.made.append(duplicate)
        return duplicate  # type: ignore[no-any-return]


class LateDist(MPIDist):  # type: ignore[misc]
    """The communicator of an executor whose receives come late; rank 0 gets what is withheld by other means."""

    def __init__(self, size: int, rank: int, situation: Situation, due: int, last: Sampled) -> None:
        super().__init__(size, rank)
        self._situation, self._due, self._last = situation, due, last
        self._dice, self._received = random.Random(rank), 0
        self.withheld_by: Any = None  # the communicator that has the message
        self.posted = 0

    def isend_object(self, obj: Any, dest: int, tag: int = 0) -> Any:
        """Send, and count the sample states."""
        request = super().isend_object(obj, dest, tag)
        self.posted += tag == PPCommTag.SAMPLE_STATE
        return request

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """Receive, late."""
        if tag == PPCommTag.SAMPLE_STATE:
            if self._situation.late_s:
                time.sleep(self._dice.uniform(0, self._situation.late_s))
            self._received += 1
            if self._situation.withheld and self.is_first_pp_rank and self._received == self._due:
                self.withheld_by = mpi_comm()
                return self._last, [[self._last.step]]
        return super().recv_object(src, tag)


class Owner:
    """Shuts an executor down when it is collected; it is in a circle."""

    def __init__(self, executor: Any) -> None:
        self._executor, self._circle = executor, self

    def __del__(self) -> None:
        self._executor.shutdown()


class Life:
    """Lives one situation on this rank; all ranks at once."""

    def __init__(self, comm: Any, line: Line, pipes: tuple[Any, Any], situation: Situation) -> None:
        self._comm, self._line, self._pipes, self._situation = comm, line, pipes, situation
        self._rank, self._size = comm.Get_rank(), comm.Get_size()

    def live(self) -> list[str]:
        """Live, and return what was wrong."""
        situation, due = self._situation, self._situation.steps * self._situation.concurrency
        era, _, mode = situation.era.partition("-")
        os.environ[ASYNC] = str(int(mode == "async" or era not in "FGH"))
        cls = executor_class(era)
        installed = trtllm_pp_progress.install(cls, drain_deadline_s=situation.deadline_s)
        Communicator.made.clear()
        own = Communicator(self._comm.Dup())
        set_mpi_comm(own)
        stage = RingStage(*self._pipes, COMPUTE_S, situation.payload_bytes)
        last = Sampled([due - 1], stage._payloads[(due - 1) % len(stage._payloads)], due - 1)
        dist = LateDist(self._size, self._rank, situation, due, last)
        executor = cls(dist, stage)
        engine = engine_of(executor)
        executor.start_worker()
        with self._holding():
            wrong = self._use(executor, dist, due)
            self._line.meet()
            self._end(executor, cls)
        wrong += self._take_withheld(dist, last)
        wrong += [f"{executor.wrong} wrong payloads"] if executor.wrong else []
        wrong += [f"the executor failed: {executor._event_loop_error!r}"] if executor._event_loop_error else []
        wrong += self._left(engine)
        self._line.meet()
        for communicator in [*Communicator.made, own]:
            communicator.Free()
        if situation.end != "uninstalled":
            installed.__exit__(None, None, None)
        return wrong

    def _use(self, executor: Any, dist: LateDist, due: int) -> list[str]:
        situation = self._situation
        if self._rank == 0:
            executor.enqueue_requests([Request(number, situation.steps) for number in range(situation.concurrency)])
            done = executor.await_responses(situation.concurrency, LIMIT_S)
            tokens = sorted(token for request in done for token in request.tokens)
            return [] if tokens == list(range(due)) else [f"tokens are {tokens}"]
        if self._rank == self._size - 1:
            limit = time.monotonic() + LIMIT_S
            while dist.posted < due and time.monotonic() < limit:
                time.sleep(0.0005)
        return []

    def _end(self, executor: Any, cls: type) -> None:
        end = self._situation.end
        if end == "shutdown":
            executor.shutdown()
        elif end == "shutdown in a thread":
            thread = threading.Thread(target=executor.shutdown)
            thread.start()
            thread.join()
        elif end == "collected":
            Owner(executor)
            gc.collect()
        elif end == "uninstalled":
            trtllm_pp_progress.uninstall(cls)
            executor.shutdown()
            self._comm.Barrier()  # the last sends are upstream's, which waits for none: it is MPI that moves them

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold the GIL now and then, from a thread of its own, where the situation says so."""
        over = threading.Event()

        def hold() -> None:
            while not over.wait(HELD_EVERY_S):
                _usleep(int(self._situation.held_s * 1e6))

        thread = threading.Thread(target=hold)
        if self._situation.held_s and self._rank == self._size - 1:
            thread.start()
        yield
        over.set()
        if thread.ident:
            thread.join()

    def _take_withheld(self, dist: LateDist, last: Sampled) -> list[str]:
        """Receive what was withheld, its sender's executor being at its end or over; the sender waits outside MPI."""
        if not self._situation.withheld:
            return []
        wrong = []
        if self._rank == 0:
            time.sleep(self._situation.withheld_s)
            host, _ = dist.withheld_by.recv(source=dist.prev_pp_rank, tag=PPCommTag.SAMPLE_STATE)
            wrong = [] if host == last else ["what was withheld is wrong"]
        self._line.meet()
        return wrong

    def _left(self, engine: Any) -> list[str]:
        """Say what the patch has not seen complete, though all was received."""
        limit = time.monotonic() + LIMIT_S
        while (left := _pending(engine)) and time.monotonic() < limit:
            time.sleep(0.001)
        return [f"left: {left}"] if left else []


def _pending(engine: Any) -> str:
    """Return what is pending, in an engine or with the keeper; after an uninstall that is upstream's to know."""
    from trtllm_pp_progress.progress.keeper import KEEPER

    tables = [name for name, table in engine.tables.items() if len(table.sends)] if not engine.retired else []
    kept = [kept for kept in KEEPER.sends if kept.completion is not None]
    return ", ".join([*tables, *(["the keeper"] if kept else [])])
