"""One GPU: what a resident sampled-result receive costs the model beside it, and what posting it later saves.

    python perf receive-residency --output residency.json       # about 3 minutes; needs a CUDA GPU, torch and cupy
    python perf receive-residency --trace residency.trace.json  # a short torch profiler trace for receive-trace

Stands for one rank of a pipeline of --pp. The main stream replays a CUDA graph of transformer layers, one replay a
step. The broadcast stream runs an emulated receiver: a few thread blocks that poll memory as NCCL's LL protocol does,
until the last rank would have the result, and then write it. The last rank is a clock: step T's result is ready --ready
of a step into the slot in which the last rank runs T, counted from this rank's own start of T, so a rank that is slowed
does not wait for it. No other GPU, no NCCL: what the wire and the real protocol add is not in these numbers.

The package's own adapter and policy run here on real streams and events. Arms: none (no receiver at all), immediate
(vLLM as it is), pre-model with delay pp-1, post-model rank-aware. docs/measuring.md defines the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from output import write
from receive.emulated import RECEIVER, ROWS, THREADS, Handler
from receive.loads import LOADS, Load, transformer
from receive.residency_rows import ARMS, Row, median, proves_nothing, table, verdicts
from verdict import PASSED, Verdict

CLOCK_LIMIT_NS = 500_000_000  # no receiver spins for longer, whatever goes wrong


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
        self.delays = {"pre-model": options.pp - 2, "post-model": options.pp - 1 - options.rank}
        self.step_ms = 0.0
        self.step_ms = statistics.median(self.run("none", 1).step_ms for _ in range(3))

    def _launch(self, kernel: Any, blocks: int, threads: int, *arguments: int) -> None:
        """Launch a kernel on torch's current stream; every argument is 64 bits wide."""
        with self.cupy.cuda.ExternalStream(self.torch.cuda.current_stream().cuda_stream):
            kernel((blocks,), (threads,), arguments)

    def run(self, arm: str, ctas: int, mark: Any = nullcontext) -> Row:
        """Run one arm once."""
        from trtllm_pp_progress.vllm.receiver import Receiver

        torch, options, pp = self.torch, self.options, self.options.pp
        steps, skip = options.steps + 2 * pp, 2 * pp
        begun = torch.zeros(steps, dtype=torch.int64, device="cuda")
        stamps = torch.zeros(steps, ctas, 2, dtype=torch.int64, device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
        marks = [(event(), event(), event(), event()) for _ in range(steps)]
        handler = Handler(pp)
        delay = self.delays.get(arm)
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
        ages = receiver.tally.ages() if receiver else {0: 1}
        return self._row(arm, ctas, marks[skip:], stamps[skip : steps - pp], int(wrong), ages)

    def _row(self, arm: str, ctas: int, kept: list[Any], stamps: Any, wrong: int, ages: dict[int, int]) -> Row:
        """Reduce the events of the kept steps and the receivers' own stamps to a row."""
        first, last = stamps[:, :, 0].min(dim=1).values, stamps[:, :, 1].max(dim=1).values
        resident = float((last - first).double().mean()) / 1e6 if arm != "none" else 0.0
        step_ms = kept[0][0].elapsed_time(kept[-1][3]) / len(kept)
        return Row(
            load=self.load.name,
            arm=arm,
            ctas=ctas,
            connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
            pp=self.options.pp,
            step_ms=step_ms,
            model_ms=statistics.mean(waited.elapsed_time(modelled) for _, waited, modelled, _ in kept),
            resident_ms=resident,
            share=resident / step_ms,
            wait_ms=statistics.mean(start.elapsed_time(waited) for start, waited, _, _ in kept),
            wrong=wrong,
            age=sum(age * count for age, count in ages.items()) / max(sum(ages.values()), 1),
        )


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
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=["decode", "prefill"])
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
    command = [sys.executable, Path(__file__).parents[1], "receive-residency"]
    words = [*map(str, command), *argv, "--connections", "default", "--output", "/dev/stdout"]
    child = subprocess.run(
        words, env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, stdout=subprocess.PIPE, text=True, timeout=240,
        check=True,
    )  # fmt: skip
    return [Row(**row) for row in json.loads(child.stdout)["rows"]]


def lacks() -> str | None:
    """Return what this machine lacks for a measurement on a GPU, or None."""
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError as error:
        return f"torch and cupy: {error}"
    return None if torch.cuda.is_available() else "a CUDA GPU"


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0, 1 where a threshold is missed, 2 without a GPU, 3 where nothing is proven."""
    arguments = sys.argv[1:] if argv is None else argv
    options = options_from(arguments)
    if lacking := lacks():
        print(f"receive-residency: needs {lacking}", file=sys.stderr)
        return 2
    import torch

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
    judged = Verdict(verdicts(rows), proves_nothing(rows))
    found = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "seconds": round(time.monotonic() - since, 1), "rows": [asdict(row) for row in rows], "misses": judged.failures,
        "inconclusive": judged.inconclusive,
    }  # fmt: skip
    if options.output:
        write(options.output, **found)
    if str(options.output) != "/dev/stdout":
        place = f"pp {options.pp}, rank {options.rank}, ready {options.ready:g}"
        print(f"# {found['device']}, torch {found['torch']}, {place}")
        print(table(rows))
        print("\n".join(f"# {line}" for line in judged.lines("every threshold held")))
    return judged.code if str(options.output) != "/dev/stdout" else PASSED
