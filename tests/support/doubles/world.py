"""What surrounds an executor: tags, communicators, batches, and who forwards requests."""

import contextlib
import enum
import os
import threading
from dataclasses import dataclass, field
from typing import Any


class PPCommTag(enum.IntEnum):
    """Message tags, with upstream's values."""

    TERMINATION = 20000
    SCHEDULE_RESULT = 20001
    EXECUTED_BATCH_NUM = 20002
    SAMPLE_STATE = 20003
    MPI_PROGRESS_PROBE = 20100  # never sent


@contextlib.contextmanager
def nvtx_range(message):
    """Time a block or, as a decorator, a method."""
    yield


# Upstream keeps one communicator for the process, and one for a thread that asked for its own.

_process: list[Any] = [None]
_thread = threading.local()


def set_mpi_comm(comm):
    """Set the communicator of the process."""
    _process[0] = comm


def set_thread_local_mpi_comm(comm):
    """Set the communicator of the calling thread; None gives it the process's again."""
    _thread.comm = comm


def mpi_comm():
    """Return the communicator of the calling thread."""
    comm = getattr(_thread, "comm", None)
    return _process[0] if comm is None else comm


class Ranks:
    """Where a rank is in the pipeline; tensor and context parallelism are 1."""

    tp_size = cp_size = 1

    def __init__(self, size, rank):
        self.pp_size, self.pp_rank, self.rank = size, rank, rank
        self.next_pp_rank, self.prev_pp_rank = (rank + 1) % size, (rank - 1) % size
        self.is_first_pp_rank, self.is_last_pp_rank = rank == 0, rank == size - 1
        self.is_second_last_pp_rank = rank == size - 2


class MPIDist(Ranks):
    """Pickled objects over MPI; an isend returns mpi4py's own pkl5.Request."""

    def isend_object(self, obj, dest, tag=0):
        """Start a send."""
        return mpi_comm().isend(obj, dest=dest, tag=tag)

    def send_object(self, obj, dest, tag=0):
        """Send, blocking."""
        mpi_comm().send(obj, dest=dest, tag=tag)

    def recv_object(self, src, tag=0):
        """Receive, blocking."""
        return mpi_comm().recv(source=src, tag=tag)


class MultiHandleWrapper:
    """What an isend returns under Ray: several handles, and nothing but wait()."""

    def __init__(self, handles):
        self.handles = handles

    def wait(self):
        """Block until all are complete."""
        for handle in self.handles:
            handle.wait()


class TorchDist(MPIDist):
    """The communicator under Ray; here MPI carries its messages all the same."""

    def isend_object(self, obj, dest, tag=0):
        """Start a send."""
        return MultiHandleWrapper([super().isend_object(obj, dest, tag)])


class RequestBroadcaster:
    """Hands rank 0's new requests down the pipeline, blocking unless TRTLLM_PP_REQ_SEND_ASYNC is 1."""

    def __init__(self, dist):
        self.dist = dist
        self.send_requests_handler = None

    def broadcast(self, new_requests):
        """Return rank 0's requests, on every rank."""
        tag = self.dist.pp_size
        if not self.dist.is_first_pp_rank:
            new_requests = self.dist.recv_object(self.dist.prev_pp_rank, tag)
        is_async = os.environ.get("TRTLLM_PP_REQ_SEND_ASYNC", "0") == "1"
        send = self.dist.isend_object if is_async else self.dist.send_object
        if not self.dist.is_last_pp_rank:
            if self.send_requests_handler is not None:
                self.send_requests_handler.wait()
            self.send_requests_handler = send(new_requests, self.dist.next_pp_rank, tag)
        return new_requests


class PyResult:
    """What a request has gathered on the last rank; the others get it in pieces."""

    def __init__(self):
        self.log_probs, self._told = [], 0

    def get_diff(self):
        """Return what is new since the last reset."""
        return self.log_probs[self._told :]

    def reset_diff(self):
        """Take all for told."""
        self._told = len(self.log_probs)

    def apply_diff(self, diff):
        """Add a piece."""
        self.log_probs += diff


@dataclass
class Request:
    """One request, and how far it is."""

    request_id: int
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    py_result: PyResult = field(default_factory=PyResult)


@dataclass
class SampleState:
    """A sampled batch; its `host` part is what travels the ring."""

    requests: list[Any]
    host: Any = None


@dataclass
class BatchStatePP:
    """One microbatch on its way round."""

    microbatch_id: int
    sample_state: SampleState
