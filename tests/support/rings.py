"""The host executor on the ring, for tests: built, used and shut down, patched or not."""

import contextlib
import time
from unittest import mock

from outside import LIMIT_S

import trtllm_pp_progress
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.tools.host import POLICIES, Dist, HostExecutor, Request, RingStage, connect_pipeline

PATCHED = {"patched": HostExecutor, "patched-flush": POLICIES["flush"]}  # what the patch is installed on
EVERY_POLICY = (*POLICIES, *PATCHED)
TESTING = (POLICIES["flush"], POLICIES["oneshot"])  # relays that wait for or test what they sent
COMPUTE_S = 0.0005


@contextlib.contextmanager
def executor_of(comm, policy, *, payload_bytes=65536, dist=None, stage=None, settings=None, variant=None, **arguments):
    """Give a started executor of a policy; the block shuts it down. Collective, on the main thread."""
    cls = variant or PATCHED.get(policy) or POLICIES[policy]
    patch = trtllm_pp_progress.install(cls, **(settings or {})) if policy in PATCHED else contextlib.nullcontext()
    with patch, keeping() as kept:
        stage = stage or RingStage(*connect_pipeline(comm), COMPUTE_S, payload_bytes)
        executor = cls(dist or Dist(comm), stage, **arguments)
        executor.kept = kept
        executor.start_worker()
        yield executor
        stage.close()


@contextlib.contextmanager
def keeping():
    """Give the list of what the keeper gets meanwhile; it gets it all the same."""
    kept, keep = [], KEEPER.keep

    def note(one):
        kept.append(one)
        keep(one)

    with mock.patch.object(KEEPER, "keep", note):
        yield kept


def until(condition):
    """Return once a condition holds, without entering MPI."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.001)


def generate(executor, steps, concurrency=1, first_id=0):
    """Run requests at once, `steps` tokens each, and return their tokens in order of the requests; rank 0 only."""
    executor.enqueue_requests([Request(first_id + i, [0], steps) for i in range(concurrency)])
    done = executor.await_responses(concurrency, LIMIT_S)
    return [request.tokens for request in sorted(done, key=lambda request: request.request_id)]


def settle(executor, line, steps):
    """Let every relay that tests or waits for what it sent finish before anybody shuts down: see finish()."""
    line.meet()  # rank 0 has all tokens
    if type(executor) in TESTING and type(executor.send_handles) is list:  # not patched
        finish(executor, steps)
    line.meet()


def finish(executor, steps):
    """Return once the relay is through with `steps` batches and their sends.

    Relay and cleanup of `flush` and `oneshot` would meet in one request, which is erroneous in MPI: seen to hang, and
    to abort in Open MPI. An idle rank 0 does not enter MPI, so its last send is driven here.
    """
    relay = executor.executed_batch_queue
    until(lambda: relay.unfinished_tasks == steps and relay.empty() and relay.not_empty._waiters)
    until(lambda: all(handle is None or handle.get_status() for handle in executor.send_handles))


def assert_all_sent(executor):
    """Assert that the patch saw every send of an executor complete.

    What was on its way when the relay was told to leave its loop is the keeper's, which sees it complete.
    """
    engine = engine_of(executor)
    assert engine.abandoned == []
    assert not engine.pending()
    missing = 0
    for name, counters in engine.status()["tables"].items():
        missing += counters["posts"] - counters["completions"]
        assert counters["failed"] == counters["unknown"] == counters["displaced"] == 0, name
    assert missing == len(executor.kept)
    until(lambda: KEEPER._inbox.empty() and not {*map(id, executor.kept)} & {*map(id, KEEPER.sends)})
    assert all(one.completion is not None for one in executor.kept), "a test raised"
