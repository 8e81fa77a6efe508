"""How far the source may run ahead, and what follows for the ranks that receive."""

from __future__ import annotations

import pytest

from trtllm_pp_progress.vllm.transport import Transport, shared_queues, transport

ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def delays(sent, pp_size):
    return [sent.longest_delay(rank, pp_size) for rank in range(pp_size - 1)]


@pytest.mark.parametrize(
    ("size", "environ", "ahead"),
    [
        (8, {}, 8),
        (2048, {}, 8),
        (32 << 10, {}, 8),  # what fits into a slot of the smallest protocol's buffer
        ((32 << 10) + 1, {}, 4),
        (70_000, {}, 2),
        (600_000, {}, 0),
        (2048, {"NCCL_BUFFSIZE": "8192"}, 8),  # a small one goes by another protocol
        (30_000, {"NCCL_BUFFSIZE": "8192"}, 0),  # whichever protocol NCCL takes
        (30_000, {"NCCL_BUFFSIZE": "8192", "NCCL_PROTO": "LL"}, 8),
        (30_000, {"NCCL_BUFFSIZE": "8192", "NCCL_PROTO": "^SIMPLE"}, 8),
        (30_000, {"NCCL_BUFFSIZE": "8192", "NCCL_PROTO": "ll,Simple"}, 0),
        (30_000, {"NCCL_BUFFSIZE": "8192", "NCCL_PROTO": "broadcast:LL"}, 0),  # not understood: all
        (2048, {"NCCL_PROTO": "Simple", "NCCL_BUFFSIZE": "16384"}, 8),
        (2049, {"NCCL_PROTO": "Simple", "NCCL_BUFFSIZE": "16384"}, 4),
        (2048, {"NCCL_LL_BUFFSIZE": "16384"}, 4),
        (2048, {"NCCL_BUFFSIZE": "-2", "NCCL_LL_BUFFSIZE": "much"}, 8),  # as the library takes it: the default
    ],
)
def test_what_is_taken_without_a_receiver(size, environ, ahead):
    """Eight slots a buffer, by protocol; a broadcast fills as many as it needs."""
    assert transport(environ, "cuda", 2, size).ahead == ahead


def test_rocm_has_smaller_slots():
    """Half the threads of a protocol: half the room."""
    assert transport({}, "cuda", 2, 20_000).ahead == 8
    assert transport({}, "rocm", 2, 20_000).ahead == 4


@pytest.mark.parametrize(
    ("environ", "platform", "found"),
    [
        ({}, "cuda", ""),
        (ONE, "cuda", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, "cuda", "CUDA_DEVICE_MAX_CONNECTIONS=4"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "cuda", ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "cuda", ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": ""}, "cuda", ""),
        ({"GPU_MAX_HW_QUEUES": "1"}, "cuda", ""),
        ({}, "rocm", "GPU_MAX_HW_QUEUES=4"),
        ({"GPU_MAX_HW_QUEUES": "1"}, "rocm", "GPU_MAX_HW_QUEUES=1"),
        ({"GPU_MAX_HW_QUEUES": "8"}, "rocm", ""),
        (ONE, "rocm", "GPU_MAX_HW_QUEUES=4"),
    ],
)
def test_who_shares_queues(environ, platform, found):
    """Eight queues by default on CUDA, four on ROCm; the reason names the variable and its value."""
    assert shared_queues(environ, platform) == found


def test_the_longest_delays():
    """On shared queues no more than is taken; else the rank-aware delays at least, which need nothing to be taken."""
    assert delays(Transport(8, 2), 4) == [4, 4, 4]
    assert delays(Transport(8, 2, "one"), 4) == [4, 4, 4]
    assert delays(Transport(8, 3), 4) == [3, 2, 2]
    assert delays(Transport(8, 3, "one"), 4) == [2, 2, 2]
    assert delays(Transport(8, 2), 8) == [7, 6, 5, 4, 4, 4, 4]
    assert delays(Transport(8, 2, "one"), 8) == [4] * 7
    assert delays(Transport(8, 3), 8) == [7, 6, 5, 4, 3, 2, 2]
    assert delays(Transport(0, 2), 4) == [3, 2, 1]
    assert delays(Transport(1, 2, "one"), 4) == [0, 0, 0]
