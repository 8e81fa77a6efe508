"""The doubles of every era on the ring, over a real MPI, patched and as they are."""

import itertools
import threading

import pytest
from doubles import ERAS, INLINE, PATCHED, TorchDist, executor_class
from lives import double_of, generate, settle
from mpi4py import MPI
from rings import assert_all_sent, until

from trtllm_pp_progress import status
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.pyexecutor.pumped_queue import PumpedQueue
from trtllm_pp_progress.pyexecutor.shape import TABLES, examine, recognise
from trtllm_pp_progress.tools.host import HostExecutor

pytestmark = pytest.mark.mpi(min_size=2)

STEPS, CONCURRENCY = 4, 2
MODES = [(era, None) for era in ERAS] + [(era, True) for era in INLINE]
LIVES = [(*mode, patched) for mode in MODES for patched in (True, False) if not patched or mode[0] in PATCHED]


def live(comm, line, era, patched, **arguments):
    """Live once: every token must arrive once and in order, whole, with what travels beside it. Return the executor."""
    with double_of(comm, era, patched, **arguments) as executor:
        executor.start_worker()
        if comm.rank == 0:
            tokens = generate(executor, STEPS, CONCURRENCY)
            assert sorted(itertools.chain(*tokens)) == list(range(STEPS * CONCURRENCY))
            assert all(row == sorted(row) and len(row) == STEPS for row in tokens)
        if era == "C" and not patched:
            settle(executor, line, STEPS * CONCURRENCY)
        executor.shutdown()
    assert executor._event_loop_error is None
    assert (executor.wrong, executor.steps) == (0, STEPS * CONCURRENCY)
    return executor


@pytest.mark.parametrize(("era", "is_async", "patched"), LIVES)
def test_two_lives_in_every_era(comm, line, era, is_async, patched):
    """Upstream builds an executor to estimate the KV cache, shuts it down, and builds another one."""
    for _ in range(2):
        executor = live(comm, line, era, patched, is_async=is_async)
        if patched:
            assert_all_sent(executor)
            assert engine_of(executor).tables["send_handles"].sends.describe(0.0)["posts"] == (
                0 if comm.rank == comm.size - 2 else STEPS * CONCURRENCY
            )
        else:
            assert engine_of(executor) is None
    assert status()["installed"] == []


@pytest.mark.parametrize("era", ["E2", "F"])
def test_forwarded_requests_are_sent_through_the_engine_too(comm, line, era):
    """TRTLLM_PP_REQ_SEND_ASYNC=1: every isend of a request list is seen, and seen complete."""
    executor = live(comm, line, era, True, TRTLLM_PP_REQ_SEND_ASYNC="1")
    assert_all_sent(executor)
    posts = engine_of(executor).tables["request_broadcaster"].sends.describe(0.0)["posts"]
    assert (posts > 0) == (comm.rank != comm.size - 1)


@pytest.mark.parametrize("era", ["E2", "F", "H"])
def test_under_ray_nothing_is_exchanged(comm, line, era):
    """Handles with only wait() are upstream's to wait for: no engine, plain tables, a plain queue, and it runs."""
    executor = live(comm, line, era, True, dist=TorchDist)
    assert engine_of(executor) is None
    assert {type(getattr(executor, name)) for name in TABLES} == {list}
    assert examine(executor, recognise(type(executor))).action == "stand down"


def test_our_own_host_is_of_era_e2():
    """What the bench measures is patched as the real one is."""
    assert recognise(HostExecutor).era == "E2"


# What moves while the executor thread is outside MPI

SIZE = 1_000_000
SOON_S, LATER_S = 20.0, 0.5


def moves(comm, line, era, patched, post, before=lambda executor: None, **environment):
    """Post 1 MB from rank 0's executor thread, keep it out of MPI, and return on rank 0 whether rank 1 received it."""
    got = []

    def send(executor):
        before(executor)
        post(executor)
        line.tell(1)
        got.append(line.hear(1, SOON_S if patched and not environment else LATER_S) is not None)

    with double_of(comm, era, patched, is_async=False, settings={"drain_deadline_s": 0.5}, **environment) as executor:
        executor.event_loop = (lambda: send(executor)) if comm.rank == 0 else lambda: None
        executor._fetch_new_requests = lambda: [bytes(SIZE)]
        executor.start_worker()
        if comm.rank == 1:
            line.hear(0)
            executor.dist.recv_object(0, MPI.ANY_TAG)
            line.tell(0)
        executor.worker_thread.join()
        if comm.rank == 0 and not got[0]:
            line.hear(1)
        line.meet()
        executor.shutdown()
    return got[0] if comm.rank == 0 else None


def into(name):
    """Return what posts into a slot of a table."""

    def post(executor):
        getattr(executor, name)[1] = executor.dist.isend_object(bytes(SIZE), 1, 7)

    return post


def forward(executor):
    """Forward requests."""
    executor.request_broadcaster.broadcast([bytes(SIZE)])


POSTS = {**{name: into(name) for name in TABLES}, "requests": forward}


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("era", ["C", "E2", "F", "H"])
def test_what_the_executor_thread_posts_moves_while_it_is_outside_mpi(comm, line, era, name):
    """NVIDIA/TensorRT-LLM#10665: a rank in NCCL makes no progress of its own; the idling relay thread does."""
    asked = {"TRTLLM_PP_REQ_SEND_ASYNC": "1"} if name == "requests" else {}
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in asked.items():
            patch.setenv(variable, value)
        assert moves(comm, line, era, True, POSTS[name]) in (True, None)


@pytest.mark.parametrize("era", ["E2", "F"])
def test_without_the_patch_it_waits_for_the_executor(comm, line, era):
    """Control: the message arrives only once its sender enters MPI again."""
    assert moves(comm, line, era, False, POSTS["send_handles"]) in (False, None)


# Era H: upstream's pump


def test_the_pumps_own_tick_stays(comm, line):
    """What no table holds still moves by upstream's tick; where the pump is off, it does not."""

    def untracked(executor):
        executor.kept = executor.dist.isend_object(bytes(SIZE), 1, 7)

    assert moves(comm, line, "H", True, untracked) in (True, None)


@pytest.mark.parametrize("how", ["variable", "stop"])
def test_where_the_pump_is_off_or_stopped_the_relay_thread_keeps_out_of_mpi(comm, line, how):
    """TLLM_PP_MPI_PROGRESS_POLL_MS=0 and the stop event mean what they meant: nothing is driven by an idle relay."""

    def before(executor):
        assert type(executor.executed_batch_queue) is PumpedQueue
        if how == "stop":
            executor._pp_mpi_progress_stop.set()
            until(executor._pp_mpi_progress_quiesced.is_set)
        else:
            assert not examine(executor, recognise(executor_class("H"))).drives

    variable = {"TLLM_PP_MPI_PROGRESS_POLL_MS": "0" if how == "variable" else "2"}
    assert moves(comm, line, "H", True, POSTS["send_handles"], before, **variable) in (False, None)


@pytest.mark.parametrize("poll", ["1000", "nan", "0"])
def test_era_h_runs_whatever_its_variable_says(comm, line, poll):
    """A slow tick, a malformed one and none at all: the ring runs, and every send is seen complete."""
    executor = live(comm, line, "H", True, is_async=True, TLLM_PP_MPI_PROGRESS_POLL_MS=poll)
    assert_all_sent(executor)
    assert not any(thread.name == "broadcast_sample_state_handler" for thread in threading.enumerate())
