"""Ranks of which only some are patched, as where a variable reached the leader's host alone."""

import itertools

import pytest
from lives import double_of, generate

from trtllm_pp_progress.pyexecutor.attachment import engine_of

pytestmark = pytest.mark.mpi(min_size=4)

STEPS = 3


@pytest.mark.parametrize(("payload_bytes", "lives"), [(1_000_000, 2), (32_000_000, 1)])
@pytest.mark.parametrize("era", ["B/D", "E2", "H"])
def test_case_65_half_of_the_ranks_patched_give_the_same_tokens_and_end(comm, era, payload_bytes, lives):
    """As seen in ai-dynamo/dynamo#4609: every token once and in order, whole, and the shutdown comes back."""
    patched = comm.rank < comm.size // 2
    for _ in range(lives):
        with double_of(comm, era, patched, payload_bytes=payload_bytes, is_async=True) as executor:
            executor.start_worker()
            if comm.rank == 0:
                tokens = generate(executor, STEPS, 1)
                assert list(itertools.chain(*tokens)) == list(range(STEPS))
            executor.shutdown()
        assert executor._event_loop_error is None
        assert (executor.wrong, executor.steps) == (0, STEPS)
        assert (engine_of(executor) is not None) == patched
