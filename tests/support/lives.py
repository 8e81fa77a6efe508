"""One life of a double of an era, over a real MPI: built, used and shut down, patched or not."""

import contextlib
import os
from unittest import mock

from doubles import MPIDist, Request, executor_class, set_mpi_comm
from mpi4py.util import pkl5
from outside import LIMIT_S
from rings import finish, keeping

import trtllm_pp_progress
from trtllm_pp_progress.tools.host import RingStage, connect_pipeline

COMPUTE_S = 0.0002


@contextlib.contextmanager
def double_of(
    comm, era, patched, *, cls=None, dist=MPIDist, is_async=None, payload_bytes=65536, settings=None, **environment
):
    """Give an executor that is not started yet; the block starts it and shuts it down. Collective, on the main thread.

    It speaks over a communicator of its own, so that nothing of it can reach a later one.
    """
    cls = cls or executor_class(era)
    if is_async is not None:
        environment["TLLM_PP_ASYNC_BROADCAST_SAMPLE_STATE"] = str(int(is_async))
    with (
        mock.patch.dict(os.environ, environment),
        trtllm_pp_progress.install(cls, **(settings or {})) if patched else contextlib.nullcontext(),
        keeping() as kept,
    ):
        set_mpi_comm(pkl5.Intracomm(comm.Dup()))
        stage = RingStage(*connect_pipeline(comm), COMPUTE_S, payload_bytes)
        executor = cls(dist(comm.size, comm.rank), stage)
        executor.kept = kept
        yield executor
        stage.close()


def generate(executor, steps, concurrency):
    """Run requests at once, `steps` tokens each, and return their tokens in order of the requests; rank 0 only."""
    executor.enqueue_requests([Request(number, steps) for number in range(concurrency)])
    done = executor.await_responses(concurrency, LIMIT_S)
    return [request.tokens for request in sorted(done, key=lambda request: request.request_id)]


def settle(executor, line, steps):
    """Let a relay that waits for its sends finish before anybody shuts down."""
    line.meet()  # rank 0 has all tokens
    finish(executor, steps)
    line.meet()
