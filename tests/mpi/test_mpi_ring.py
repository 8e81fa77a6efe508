"""The host ring over a real MPI: every relay gives the right tokens, one executor after the other."""

import itertools

import pytest
from outside import LIMIT_S
from rings import EVERY_POLICY, PATCHED, assert_all_sent, executor_of, generate, settle

import trtllm_pp_progress
from trtllm_pp_progress.pyexecutor.attachment import engine_of
from trtllm_pp_progress.tools.host import HostExecutor, Request

pytestmark = pytest.mark.mpi(min_size=2)

STEPS = 12


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_every_relay_gives_the_right_tokens(comm, line, policy, concurrency):
    """Each token arrives once and in order, with its payload whole, on every rank."""
    with executor_of(comm, policy, reentry_s=0.005) as executor:
        if comm.rank == 0:
            tokens = generate(executor, STEPS, concurrency)
            assert sorted(itertools.chain(*tokens)) == list(range(STEPS * concurrency))
            assert all(row == sorted(row) and len(row) == STEPS for row in tokens)
        settle(executor, line, STEPS * concurrency)
        executor.shutdown()
    assert executor.error is None
    assert executor.wrong == 0
    assert executor.steps == STEPS * concurrency
    received = 0 if comm.rank == comm.size - 1 else executor.steps
    assert len(executor.transfers) == received
    if policy in PATCHED:
        assert_all_sent(executor)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_requests_of_different_lengths_are_in_flight_together(comm, line, policy):
    """As some end earlier the pipeline runs emptier, and relays that the executor thread makes fall due earlier."""
    lengths = [3, STEPS, 6, 9]
    with executor_of(comm, policy, reentry_s=0.005) as executor:
        if comm.rank == 0:
            executor.enqueue_requests([Request(i, [0], length) for i, length in enumerate(lengths)])
            done = executor.await_responses(len(lengths), LIMIT_S)
            assert {request.request_id: len(request.tokens) for request in done} == dict(enumerate(lengths))
        settle(executor, line, sum(lengths))
        executor.shutdown()
    assert (executor.error, executor.wrong, executor.steps) == (None, 0, sum(lengths))


def test_the_ring_notices_a_wrong_payload(comm, line):
    """Control: a single wrong byte in what the last rank sends is counted by every other rank."""
    with executor_of(comm, "patched", reentry_s=0.005) as executor:
        if comm.rank == comm.size - 1:
            payloads = executor.stage._payloads
            payloads[1] = payloads[1][:-1] + bytes([payloads[1][-1] ^ 1])
        line.meet()
        if comm.rank == 0:
            generate(executor, 4)
        executor.shutdown()
    assert executor.wrong == (0 if comm.rank == comm.size - 1 else 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_fails_as_it_ends_can_be_told(comm, line):
    """All responses are there by then, so nothing else would say that messages may have been left behind."""
    with executor_of(comm, "patched", reentry_s=0.005) as executor:
        forward = executor.stage.forward

        def fail_at_the_end(requests):
            host = forward(requests)
            if not requests:
                raise LookupError("the last batch")
            return host

        executor.stage.forward = fail_at_the_end
        if comm.rank == 0:
            generate(executor, 4)
        settle(executor, line, 4)
        executor.raise_error()  # nothing yet
        line.meet()
        executor.shutdown()
    with pytest.raises(RuntimeError, match=rf"the executor loop of rank {comm.rank} failed"):
        executor.raise_error()
    assert isinstance(executor.error, LookupError)


@pytest.mark.parametrize("policy", ["regressed", "patched", "patched-flush"])
def test_two_executors_one_after_the_other_in_a_process(comm, line, policy):
    """Upstream builds one to estimate the KV cache, shuts it down and builds a second one."""
    for turn in range(2):
        with executor_of(comm, policy, reentry_s=0.005) as executor:
            if comm.rank == 0:
                assert generate(executor, STEPS, first_id=100 * turn) == [list(range(STEPS))]
            settle(executor, line, STEPS)
            executor.shutdown()
        assert executor.wrong == 0
        if policy in PATCHED:
            assert_all_sent(executor)


def test_two_executors_under_one_install_have_an_engine_each(comm, line):
    """What is counted for the first executor is not counted for the second."""
    with trtllm_pp_progress.install(HostExecutor):
        for turn in range(2):
            with executor_of(comm, "regressed", reentry_s=0.005) as executor:
                if comm.rank == 0:
                    assert generate(executor, STEPS, first_id=100 * turn) == [list(range(STEPS))]
                settle(executor, line, STEPS)
                executor.shutdown()
            assert_all_sent(executor)
            counters = engine_of(executor).status()["tables"]["send_handles"]
            assert counters["posts"] == (0 if comm.rank == comm.size - 2 else STEPS)
