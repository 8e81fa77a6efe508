"""One rank on one GPU: an emulated receiver that holds thread blocks, and the surface of vLLM's handler around it."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["RECEIVER", "ROWS", "THREADS", "Handler", "Slot"]

THREADS = 512  # of one block, as NCCL's LL broadcast
ROWS = 256  # requests in a result

RECEIVER = r"""
extern "C" __global__ void emulated_receive(
    const volatile unsigned int* lines, const long long* begun, long long offset, long long limit,
    long long* out, long long value, long long rows, long long* stamps)
{
    long long now, first;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
    if (threadIdx.x == 0) stamps[2 * blockIdx.x] = first;
    const long long ready = *begun + offset;
    const long long line = blockIdx.x * blockDim.x + threadIdx.x;
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (lines[line] == 0 && now < ready && now - first < limit);
    for (long long row = line; row < rows; row += gridDim.x * blockDim.x) out[row] = value;
    __syncthreads();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) stamps[2 * blockIdx.x + 1] = now;
}
extern "C" __global__ void stamp(long long* where)
{
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    *where = now;
}
"""


class Slot:
    """A step's receive as a handler keeps it."""

    def __init__(self, event: Any, tokens: Any, step: int) -> None:
        self.event, self.tokens, self.step = event, tokens, step


class Handler:
    """The surface of vLLM's PPHandler that the adapter uses, on this machine's real streams."""

    is_last_rank = False

    def __init__(self, pp: int) -> None:
        import torch

        self.torch = torch
        self.main_stream = torch.cuda.current_stream()
        self.broadcast_stream = torch.cuda.Stream()
        self.broadcast_group = object()
        self.queue: deque[Slot | None] = deque([None] * pp)
        self.step = -1

    def receive(self) -> None:
        """Issue this step's broadcast on the side stream."""
        torch = self.torch
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            tokens = torch.empty(ROWS, dtype=torch.int64, device="cuda")
            torch.distributed.broadcast(tokens, src=self.step, group=self.broadcast_group)
            event = self.broadcast_stream.record_event()
            tokens.record_stream(self.main_stream)
        self.queue[-1] = Slot(event, tokens, self.step)

    def get_prev_sampled_outputs(self) -> Slot | None:
        """Let the main stream wait for the oldest step's result."""
        self.step += 1
        slot = self.queue.popleft()
        self.queue.append(None)
        if slot is not None:
            self.main_stream.wait_event(slot.event)
        return slot
