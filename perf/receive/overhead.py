"""Host time that the receive policy adds to an engine step, around vLLM's own PPHandler, on a CPU.

    python perf receive-overhead --rows 64

Streams, events and broadcasts are empty functions, so what is left is Python: the handler's, and on top of it ours.
A step is one get_prev_sampled_outputs, one receive and the worker's execute_model around nothing; on the last rank, one
broadcast and execute_model. Arms take turns in rounds of milliseconds. Columns, in microseconds of the thread's CPU
time per step: the least and the lower quartile of the rounds, and what the least adds to stock's. `off` is stock's code
again: what it adds is what this measurement cannot resolve. The last column does not depend on the machine or its load:
the Python bytecode instructions that an arm adds to a step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import output

ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "off": {"receive": "off"},
    "before warm-up": {"receive": 3},
    "delay 2": {"receive": 2},
    "delay 3": {"receive": 3},
    "rank-aware": {"receive": "rank-aware"},
    "rank-aware, no timing": {"receive": "rank-aware", "timing": "off"},
    "last rank, stock": {"last": True},
    "last rank": {"receive": "rank-aware", "last": True},
    "last rank, no timing": {"receive": "rank-aware", "timing": "off", "last": True},
}


class Nothing:
    """A stream or an event that costs a call and no more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever CUDA's would."""

    def record_event(self) -> Nothing:
        """Return an event."""
        return EVENT

    def query(self) -> bool:
        """Say that the result is in: the usual case."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Say that a span took no time."""
        return 0.0

    def wait_stream(self, other: Any) -> None:
        """Wait for nothing."""

    wait_event = record = wait_stream


EVENT = Nothing()


class Use:
    """A stream's context."""

    current = Nothing()

    def __init__(self, stream: Any) -> None:
        """Take a stream."""
        self.stream = stream

    def __enter__(self) -> None:
        """Make it the current one."""
        self.before, Use.current = Use.current, self.stream

    def __exit__(self, *error: Any) -> None:
        """Make the one before the current one."""
        Use.current = self.before


def fake_cuda(torch: Any) -> None:
    """Let torch's streams, events and broadcasts be nothing."""
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda device=None: Use.current
    torch.cuda.stream = Use
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.distributed.broadcast = lambda tensor, src, group: None


def make(rows: int, pp: int, receive: str | int = "off", last: bool = False, **settings: Any) -> tuple[Any, Any]:
    """Return a function that runs one step under one arm, and its worker."""
    import numpy as np
    import torch
    import vllm.v1.worker.gpu.pp_utils as pp_utils

    from trtllm_pp_progress.vllm import attach
    from trtllm_pp_progress.vllm import shape as _shape

    rank = pp - 1 if last else 0
    group = SimpleNamespace(
        is_last_rank=last, last_rank=pp - 1, world_size=pp, rank_in_group=rank,
        make_sibling_device_group=lambda group_desc: object(),
    )  # fmt: skip
    pp_utils.get_pp_group = lambda: group
    handler = pp_utils.PPHandler(rows, 0, torch.device("cpu"))
    live = {"request": 0}
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(pp_handler=handler, req_states=SimpleNamespace(req_id_to_index=live)),
        execute_model=lambda output: None,
        compile_or_warm_up_model=lambda: None,
    )
    if receive != "off":
        facts = _shape.Facts(pp, rank, "cuda", _shape.RUNNER, False, _shape.HANDLER, "nccl", "")
        _shape.observe = lambda worker: replace(facts, unknown_shape=_shape.unknown_shape(worker, pp))
        attach(worker, receive=receive, **settings)
    output = SimpleNamespace(total_num_scheduled_tokens=rows)
    index = np.arange(rows)
    batch = SimpleNamespace(
        num_reqs=rows, idx_mapping=torch.from_numpy(index), idx_mapping_np=index, num_draft_tokens=0,
        num_computed_tokens_np=np.full(rows, 9), num_scheduled_tokens=np.ones(rows, dtype=int),
        prefill_len_np=np.full(rows, 5), max_seq_len_np=np.full(rows, 99), is_prefilling_np=np.zeros(rows, dtype=bool),
    )  # fmt: skip
    sampled, counts = torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)

    def step() -> None:
        handler.get_prev_sampled_outputs()
        worker.execute_model(output)
        handler.receive(batch, False)

    def last_step() -> None:
        worker.execute_model(output)
        handler.broadcast(sampled, counts, counts, batch)

    return last_step if last else step, worker


def rounds(steps: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return every round's microseconds per step, arm by arm; the arms take turns, each time from another one on."""
    import torch

    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                step = steps[name]
                since = time.thread_time_ns()
                for _ in range(options.steps):
                    step()
                times[name].append((time.thread_time_ns() - since) / options.steps / 1e3)
    return times


def instructions(step: Any, steps: int = 20) -> float:
    """Return how many bytecode instructions a step takes; those of C code do not count."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.settrace(before)
    return count / steps


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(description="Measure the host cost of the receive policy per step.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="of one round")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="stock is added")
    options = parser.parse_args(argv)
    import torch
    import torch.distributed

    fake_cuda(torch)
    torch.set_num_threads(1)
    steps = {}
    for name in ARMS:
        if name in options.arms or "stock" in name:
            steps[name], worker = make(options.rows, options.pp, **ARMS[name])
            if name != "before warm-up":
                worker.compile_or_warm_up_model()
    times = rounds(steps, options)
    with torch.inference_mode():
        counts = {name: instructions(step) for name, step in steps.items()}
    load = os.getloadavg()[0]
    size = f"rows {options.rows}, pp {options.pp}, {options.rounds} rounds of {options.steps} steps"
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {size}; load {load:.1f} of {os.cpu_count()}"
    )
    rows = []
    for name, found in times.items():
        stock = "last rank, stock" if "last" in name else "stock"
        quarter = statistics.quantiles(found, n=4)[0] if len(found) > 1 else found[0]
        adds, more = min(found) - min(times[stock]), counts[name] - counts[stock]
        rows.append((name, f"{min(found):.2f}", f"{quarter:.2f}", f"{adds:+.2f}", f"{more:+.0f}"))
    print(output.table(("arm", "least us", "quarter us", "adds us", "instructions"), rows))
    return 0
