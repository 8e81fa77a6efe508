"""Host time that the receive policy adds to an engine step, around vLLM's own PPHandler, on a CPU.

    python perf/receive_overhead.py --rows 64

Streams, events and broadcasts are empty functions, so what is left is Python: the handler's, and on top of it ours.
Columns, in microseconds per step (one get_prev_sampled_outputs, one receive, and the worker's execute_model around
nothing): the median and the least of the rounds, and what the median adds to stock. Arms are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ARMS = {
    "stock": None,
    "off": {"receive": "off"},
    "before warm-up": {"receive": 3},
    "pre-model 3": {"receive": 3, "placement": "pre-model"},
    "post-model 3": {"receive": 3},
    "rank-aware": {"receive": "rank-aware"},
    "rank-aware, no timing": {"receive": "rank-aware", "timing": "off"},
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

    def wait_stream(self, other: Any) -> None:
        """Wait for nothing."""

    wait_event = record = wait_stream


EVENT = Nothing()


class Use:
    """A stream's context that is entered and left and does nothing."""

    def __init__(self, stream: Any) -> None:
        """Take a stream."""

    def __enter__(self) -> None:
        """Enter."""

    def __exit__(self, *error: Any) -> None:
        """Leave."""


def fake_cuda(torch: Any) -> None:
    """Let torch's streams, events and broadcasts be nothing."""
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda device=None: EVENT
    torch.cuda.stream = Use
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.distributed.broadcast = lambda tensor, src, group: None


def make(rows: int, pp: int, arguments: dict[str, Any] | None) -> Any:
    """Return a function that runs one step, under one arm."""
    import numpy as np
    import torch
    import vllm.v1.worker.gpu.pp_utils as pp_utils

    from trtllm_pp_progress.vllm import _gates, attach

    group = SimpleNamespace(
        is_last_rank=False, last_rank=pp - 1, world_size=pp, rank_in_group=0,
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
    if arguments and arguments["receive"] != "off":
        facts = _gates.Facts(pp, 0, "cuda", _gates.RUNNER, False, True, _gates.HANDLER, "nccl", "")
        _gates.observe = lambda worker: replace(facts, unknown_shape=_gates.unknown_shape(worker, pp))
        attach(worker, **arguments)
    output = SimpleNamespace(total_num_scheduled_tokens=rows)
    index = np.arange(rows)
    batch = SimpleNamespace(
        num_reqs=rows, idx_mapping=torch.from_numpy(index), idx_mapping_np=index, num_draft_tokens=0,
        num_computed_tokens_np=np.full(rows, 9), num_scheduled_tokens=np.ones(rows, dtype=int),
        prefill_len_np=np.full(rows, 5), max_seq_len_np=np.full(rows, 99), is_prefilling_np=np.zeros(rows, dtype=bool),
    )  # fmt: skip

    def step() -> None:
        handler.get_prev_sampled_outputs()
        worker.execute_model(output)
        handler.receive(batch, False)

    return step, worker


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(description="Measure the host cost of the receive policy per step.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000, help="of one round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)
    import torch
    import torch.distributed

    fake_cuda(torch)
    torch.set_num_threads(1)
    steps = {}
    for name, arguments in ARMS.items():
        step, worker = make(options.rows, options.pp, arguments)
        if name != "before warm-up":
            worker.compile_or_warm_up_model()
        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in steps}
    with torch.inference_mode():
        for _ in range(options.rounds + 1):
            for name, step in steps.items():
                since = time.thread_time()
                for _ in range(options.steps):
                    step()
                times[name].append((time.thread_time() - since) / options.steps * 1e6)
    stock = statistics.median(times["stock"][1:])
    size = f"rows {options.rows}, pp {options.pp}, {options.rounds} rounds of {options.steps} steps"
    print(f"# torch {torch.__version__}, {size}; CPU time of the thread")
    print(f"{'arm':>22} {'median us':>10} {'least us':>10} {'adds us':>8}")
    for name, found in times.items():
        middle = statistics.median(found[1:])  # the first round warms up
        print(f"{name:>22} {middle:>10.2f} {min(found[1:]):>10.2f} {middle - stock:>+8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
