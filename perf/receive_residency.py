"""One GPU: what a resident sampled-result receive costs the model beside it, and what posting it later saves.

    python perf/receive_residency.py --output residency.json       # about 3 minutes; needs a CUDA GPU, torch and cupy
    python perf/receive_residency.py --trace residency.trace.json  # a short torch profiler trace for receive_trace.py

Stands for one rank of a pipeline of --pp. The main stream replays a CUDA graph of transformer layers, one replay a
step. The broadcast stream runs an emulated receiver: a few thread blocks that poll memory as NCCL's LL protocol does,
until the last rank would have the result, and then write it. The last rank is a clock: step T's result is ready --ready
of a step into the slot in which the last rank runs T, counted from this rank's own start of T, so a rank that is slowed
does not wait for it. No other GPU, no NCCL: what the wire and the real protocol add is not in these numbers.

The package's own adapter and policy run here on real streams and events. Arms: none (no receiver at all), immediate
(vLLM as it is), pre-model with delay pp-1, post-model rank-aware. Columns, per step in milliseconds: model (the graph
alone, by events), resident (a receive's first to last instruction, by the GPU's clock), share (of the time with a
receive resident), wait (of the main stream for the result at T + pp), #wrong (consumed values that are not step T's).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # from a checkout, this package's own policy and adapter

SCHEMA = 1
THREADS = 512  # of one block, as NCCL's LL broadcast
ROWS = 256  # requests in a result
ARMS = ("none", "immediate", "pre-model", "post-model")
CLOCK_LIMIT_NS = 500_000_000  # no receiver spins for longer, whatever goes wrong

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


@dataclass(frozen=True)
class Load:
    """A transformer-sized step: bf16 layers of a gated MLP model, `tokens` at once."""

    name: str
    tokens: int
    layers: int
    hidden: int = 4096
    inner: int = 14336


LOADS = {"decode": Load("decode", 64, 32), "prefill": Load("prefill", 2048, 8)}


@dataclass
class Row:
    """One arm's measurement: medians over rounds, times in milliseconds per step."""

    load: str
    arm: str
    ctas: int
    connections: str
    pp: int
    step_ms: float
    model_ms: float
    resident_ms: float
    share: float
    wait_ms: float
    wrong: int
    age: float  # mean steps between saving and posting


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


def transformer(load: Load, device: str = "cuda") -> Callable[[], None]:
    """Return a function that runs one step of a load: on a GPU a graph's replay, on a CPU the layers themselves."""
    import torch

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

    layers = [
        (make(load.hidden, load.hidden * 3 // 2), make(load.hidden, load.hidden), make(load.hidden, 2 * load.inner),
         make(load.inner, load.hidden))
        for _ in range(load.layers)
    ]  # fmt: skip
    state = make(load.tokens, load.hidden)

    def model() -> None:
        x = state
        for qkv, out, up, down in layers:
            mixed = torch.nn.functional.rms_norm(x, (load.hidden,)) @ qkv
            x = x + mixed[:, : load.hidden] @ out
            gate, value = (torch.nn.functional.rms_norm(x, (load.hidden,)) @ up).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * value) @ down
        state.copy_(torch.nn.functional.rms_norm(x, (load.hidden,)))

    if device == "cpu":
        return model
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model()
    torch.cuda.current_stream().wait_stream(side)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model()
    torch.cuda.synchronize()

    def replay(needed: Any = (layers, state)) -> None:  # a graph does not keep what it reads and writes
        graph.replay()

    return replay


class Bench:
    """One load on one GPU, run under any arm."""

    def __init__(self, load: Load, options: argparse.Namespace) -> None:
        import cupy
        import torch

        self.torch, self.cupy, self.load, self.options = torch, cupy, load, options
        module = cupy.RawModule(code=RECEIVER)
        self.receiver, self.stamp = module.get_function("emulated_receive"), module.get_function("stamp")
        self.lines = torch.zeros(64 * THREADS, dtype=torch.int32, device="cuda")
        self.model = transformer(load)
        self.step_ms = 0.0
        self.step_ms = statistics.median(self.run("none", 1).step_ms for _ in range(3))

    def _launch(self, kernel: Any, blocks: int, threads: int, *arguments: int) -> None:
        """Launch a kernel on torch's current stream; every argument is 64 bits wide."""
        with self.cupy.cuda.ExternalStream(self.torch.cuda.current_stream().cuda_stream):
            kernel((blocks,), (threads,), arguments)

    def run(self, arm: str, ctas: int, mark: Any = nullcontext) -> Row:
        """Run one arm once."""
        from trtllm_pp_progress.vllm._adapter import Receiver

        torch, options, pp = self.torch, self.options, self.options.pp
        steps, skip = options.steps + 2 * pp, 2 * pp
        begun = torch.zeros(steps, dtype=torch.int64, device="cuda")
        stamps = torch.zeros(steps, ctas, 2, dtype=torch.int64, device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
        marks = [(event(), event(), event(), event()) for _ in range(steps)]
        handler = Handler(pp)
        delay = {"pre-model": pp - 2, "post-model": pp - 1 - options.rank}.get(arm)
        receiver = Receiver(handler, delay) if delay is not None else None
        offset = int((pp - 1 - options.rank + options.ready) * self.step_ms * 1e6)

        def broadcast(tokens: Any, src: int, group: Any) -> None:
            at = (begun.data_ptr() + 8 * src, stamps.data_ptr() + 16 * ctas * src)
            arguments = (self.lines.data_ptr(), at[0], offset, CLOCK_LIMIT_NS, tokens.data_ptr(), src, ROWS, at[1])
            self._launch(self.receiver, ctas, THREADS, *arguments)

        stock, torch.distributed.broadcast = torch.distributed.broadcast, broadcast
        try:
            if receiver:
                receiver.activate()
            torch.cuda.synchronize()
            for step, (start, waited, modelled, end) in enumerate(marks):
                with mark(f"execute_{step}"):
                    start.record()
                    slot = handler.get_prev_sampled_outputs()
                    waited.record()
                    self._launch(self.stamp, 1, 1, begun.data_ptr() + 8 * step)
                    self.model()
                    modelled.record()
                    if arm != "none":
                        handler.receive()
                    if slot is not None:
                        wrong += (slot.tokens != slot.step).sum()
                    end.record()
            if receiver:
                receiver.deactivate("end")
            torch.cuda.synchronize()
        finally:
            torch.distributed.broadcast = stock
        kept = marks[skip:]
        seen = stamps[skip : steps - pp]
        first, last = seen[:, :, 0].min(dim=1).values, seen[:, :, 1].max(dim=1).values
        resident = float((last - first).double().mean()) / 1e6 if arm != "none" else 0.0
        step_ms = kept[0][0].elapsed_time(kept[-1][3]) / len(kept)
        ages = receiver.tally.ages() if receiver else {0: 1}
        return Row(
            self.load.name, arm, ctas, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"), pp, step_ms,
            statistics.mean(waited.elapsed_time(modelled) for _, waited, modelled, _ in kept), resident,
            resident / step_ms, statistics.mean(start.elapsed_time(waited) for start, waited, _, _ in kept), int(wrong),
            sum(age * count for age, count in ages.items()) / max(sum(ages.values()), 1),
        )  # fmt: skip


def median(rows: list[Row]) -> Row:
    """Return the median of several runs of one arm, field by field; wrong values add up."""
    middle = asdict(rows[0])
    for name in ("step_ms", "model_ms", "resident_ms", "share", "wait_ms"):
        middle[name] = statistics.median(getattr(row, name) for row in rows)
    return Row(**{**middle, "wrong": sum(row.wrong for row in rows)})


def measure(options: argparse.Namespace) -> list[Row]:
    """Run every load, arm and number of blocks, rounds interleaved."""
    rows = []
    for name in options.loads:
        bench = Bench(LOADS[name], options)
        arms = [arm for arm in ARMS[1:] if options.pp > 2 or arm != "pre-model"]  # which would be immediate
        kinds = [("none", 1), *((arm, ctas) for ctas in options.ctas for arm in arms)]
        runs: dict[tuple[str, int], list[Row]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind in kinds:
                runs[kind].append(bench.run(*kind))
        rows += [median(found) for found in runs.values()]
        del bench
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'load':>8} {'connections':>11} {'ctas':>5} {'arm':>11} {'step':>8} {'model':>8} {'resident':>9} "
        f"{'share':>6} {'wait':>8} {'age':>5} {'#wrong':>6}",
        f"{'':>8} {'':>11} {'':>5} {'':>11} {'ms':>8} {'ms':>8} {'ms':>9} {'':>6} {'ms':>8} {'steps':>5} {'':>6}",
    ]
    lines += [
        f"{row.load:>8} {row.connections:>11} {row.ctas:>5} {row.arm:>11} {row.step_ms:>8.3f} {row.model_ms:>8.3f} "
        f"{row.resident_ms:>9.3f} {row.share:>6.0%} {row.wait_ms:>8.3f} {row.age:>5.2f} {row.wrong:>6}"
        for row in rows
    ]
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> list[str]:
    """Return what misses the thresholds: post-model against immediate and against no receiver at all."""
    found = {(row.load, row.connections, row.ctas, row.arm): row for row in rows}
    misses = [f"{row.load} {row.arm} {row.ctas} CTAs: {row.wrong} wrong values" for row in rows if row.wrong]
    for (load, connections, ctas, arm), row in found.items():
        if arm != "post-model":
            continue
        where = f"{load}, {ctas} CTAs, connections {connections}"
        immediate, none = found[load, connections, ctas, "immediate"], found[load, connections, 1, "none"]
        if row.resident_ms > 0.25 * immediate.resident_ms:
            misses.append(f"{where}: resident {row.resident_ms:.3f} ms, immediate {immediate.resident_ms:.3f} ms")
        if row.wait_ms > immediate.wait_ms + 0.02 * none.step_ms:  # a fiftieth of a step is the events' own noise
            misses.append(f"{where}: waited {row.wait_ms:.3f} ms, immediate {immediate.wait_ms:.3f} ms")
        if row.model_ms > 1.02 * none.model_ms:
            misses.append(f"{where}: model {row.model_ms:.3f} ms, {none.model_ms:.3f} ms with no receiver")
    return misses


def trace(options: argparse.Namespace) -> None:
    """Write a torch profiler trace of a few steps of the post-model arm, each marked as vLLM's profiler does."""
    import torch

    bench = Bench(LOADS[options.loads[0]], options)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        bench.run(options.trace_arm, options.ctas[-1], torch.profiler.record_function)
    profiler.export_chrome_trace(str(options.trace))


def options_from(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure a resident receive's cost on one GPU.")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=sorted(LOADS))
    parser.add_argument("--ctas", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="thread blocks of the receiver")
    parser.add_argument("--pp", type=int, default=4, help="stages of the emulated pipeline")
    parser.add_argument("--rank", type=int, default=0, help="the stage that this GPU stands for")
    parser.add_argument("--ready", type=float, default=0.95, help="when in its last slot a result is ready, in steps")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every arm; medians are reported")
    parser.add_argument("--connections", choices=("default", "1", "both"), default="both",
                        help="CUDA_DEVICE_MAX_CONNECTIONS; both runs the second in a process of its own")  # fmt: skip
    parser.add_argument("--output", type=Path, help="where to write rows and versions as JSON")
    parser.add_argument("--trace", type=Path, help="write a profiler trace instead of measuring")
    parser.add_argument("--trace-arm", choices=ARMS[1:], default="post-model")
    options = parser.parse_args(argv)
    if options.pp < 2 or not 0 <= options.rank < options.pp - 1:
        parser.error(f"--pp {options.pp} --rank {options.rank}: a rank that receives, from 0 to pp - 2")
    if not 0 < options.ready <= 1:
        parser.error(f"--ready {options.ready}: more than 0, at most 1")
    if options.steps < 2 or options.rounds < 1 or not all(0 < ctas <= 64 for ctas in options.ctas):
        parser.error("--steps at least 2, --rounds at least 1, --ctas from 1 to 64")
    return options


def _with_one_connection(argv: list[str]) -> list[Row]:
    """Measure again where every stream of the process shares one hardware queue."""
    words = [sys.executable, __file__, *argv, "--connections", "default", "--output", "/dev/stdout"]
    child = subprocess.run(
        words, env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, stdout=subprocess.PIPE, text=True, timeout=240,
        check=True,
    )  # fmt: skip
    return [Row(**row) for row in json.loads(child.stdout)["rows"]]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0, 1 where a threshold is missed, 2 where there is no GPU."""
    arguments = sys.argv[1:] if argv is None else argv
    options = options_from(arguments)
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError as error:
        print(f"receive_residency: needs torch and cupy: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("receive_residency: needs a CUDA GPU", file=sys.stderr)
        return 2
    if options.trace:
        trace(options)
        return 0
    since = time.monotonic()
    if options.connections == "1":
        rows = _with_one_connection(arguments)
    else:
        rows = measure(options)
        if options.connections == "both":
            torch.cuda.empty_cache()
            rows += _with_one_connection(arguments)
    misses = verdicts(rows)
    found = {
        "schema": SCHEMA, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "seconds": round(time.monotonic() - since, 1),
        "rows": [asdict(row) for row in rows], "misses": misses,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    if str(options.output) != "/dev/stdout":
        place = f"pp {options.pp}, rank {options.rank}, ready {options.ready:g}"
        print(f"# {found['device']}, torch {found['torch']}, {place}")
        print(table(rows))
        print("\n".join(f"# MISSED {miss}" for miss in misses) or "# every threshold held")
    return 1 if misses and str(options.output) != "/dev/stdout" else 0


if __name__ == "__main__":
    raise SystemExit(main())
