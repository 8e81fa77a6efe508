"""Several GPUs: vLLM's own PPHandler on a real NCCL group, with its receives posted at every delay.

    mkdir carried && unzip -p vllm-0.33.0*.whl vllm/v1/worker/gpu/pp_utils.py > carried/pp_utils.py
    torchrun --nproc-per-node 2 perf/receive_nccl.py --carried carried --output nccl.json
    mpirun -n 4 python perf/receive_nccl.py --carried carried --meeting file:///tmp/meeting --output nccl.json

One pipeline stage a GPU, at least 2. vLLM need not be installed: --carried is a folder with the one file of the wheel
that holds the class (12 KB, `pip download --no-deps vllm==0.33.0` gets the wheel); what that file imports from vLLM is
stood in for here, the sibling group by the call that vLLM makes for it. Needs torch with NCCL and nothing else. Leave
NVLink multicast off (NCCL_NVLS_ENABLE=0). With --rounds 2 it took 21 s on 2 H200s and 41 s on 4.

A step, as in vLLM: consume what is fed back, receive the activation, run the stage's model (a graph of transformer
layers), send the activation, receive or broadcast the sampled result. Every value depends on results fed back before.
Arms: none (no feedback at all), immediate (vLLM as it is), every delay after the model, rank-aware. Rows
are per rank and arm, medians of rounds, milliseconds per step: model (the graph alone), broadcast (a step's broadcasts
on their stream, from the first one's turn to the last one's end), wait (of the main stream for the result at T + pp).

Then the source alone: 1 to 12 small broadcasts that no receiver has posted yet. `done` is how many of them had ended
before the receivers came, 50 ms late, `first` and `last` how long the first and the last were under way.

The exit status is 1 if a consumed result differs between arms or from what the last rank sent, if some are missing, or
if the collectives of two ranks differ in order.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from receive_residency import LOADS, Load, transformer  # noqa: E402

SCHEMA = 1
MODULUS = 50_021
OUTSTANDING = range(1, 13)
LATE_S = 0.05  # how long the receivers of the source's measurement keep it waiting
LOADS = LOADS | {"tiny": Load("tiny", 4, 1, 32, 64)}  # for a try on CPUs


@dataclass
class Row:
    """One arm on one rank: times in milliseconds per step."""

    load: str
    arm: str
    rank: int
    step_ms: float
    model_ms: float
    broadcast_ms: float
    wait_ms: float
    age: float
    wrong: int


def arms(size: int) -> list[str]:
    """Return the names of what is compared on that many ranks, in order."""
    return ["none", "immediate", *(f"post-model {delay}" for delay in range(1, size)), "rank-aware"]


class Spans:
    """Pairs of events around work of a stream, read when all is done."""

    def __init__(self, torch: Any) -> None:
        self._event = lambda: torch.cuda.Event(enable_timing=True)
        self._torch = torch
        self.pairs: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def start(self) -> Any:
        """Mark the present end of the current stream."""
        event = self._event()
        event.record(self._torch.cuda.current_stream())
        return event

    def stop(self, name: str, start: Any) -> None:
        """End a span on the current stream."""
        self.pairs[name].append((start, self.start()))

    def mean(self, name: str, skip: int = 0) -> float:
        """Return the mean of a kind in milliseconds, the first few left out; the GPU must be at rest."""
        found = [start.elapsed_time(end) for start, end in self.pairs[name][skip:]]
        return statistics.mean(found) if found else 0.0


def handler_class(carried: Path, group: Any) -> Any:
    """Return PPHandler of a carried pp_utils.py, on stand-ins for what that file imports from vLLM."""
    import torch

    def to_device(data: Any, device: Any) -> Any:
        data = torch.from_numpy(data)
        return data.to(device) if str(device) == "cpu" else data.pin_memory().to(device, non_blocking=True)

    names: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.envs": {"VLLM_XPU_PP_MICROBATCH": True}, "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: group},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_xpu=lambda: False)},
        "vllm.sequence": {"IntermediateTensors": dict}, "vllm.utils": {},
        "vllm.utils.torch_utils": {"async_tensor_h2d": to_device}, "vllm.v1": {}, "vllm.v1.worker": {},
        "vllm.v1.worker.gpu": {}, "vllm.v1.worker.gpu.input_batch": {"InputBatch": object},
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in names}
    try:
        for name, content in names.items():
            module = sys.modules[name] = ModuleType(name)
            vars(module).update(content)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        spec = importlib.util.spec_from_file_location("carried_pp_utils", carried / "pp_utils.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["carried_pp_utils"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.PPHandler
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


class Stage:
    """One rank: its groups, its model, and steps under any arm."""

    def __init__(self, options: argparse.Namespace, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.options, self.rank, self.size = torch, dist, options, rank, size
        self.last = rank == size - 1
        self.device = torch.device("cpu" if options.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        backend = "gloo" if options.device == "cpu" else "nccl"
        self.talk = dist.new_group(backend="gloo")
        group = SimpleNamespace(
            is_last_rank=self.last, last_rank=size - 1, world_size=size, rank_in_group=rank,
            make_sibling_device_group=lambda group_desc: dist.new_group(
                list(range(size)), backend=backend, group_desc=group_desc
            ),
        )  # fmt: skip
        self.make_handler = lambda: handler_class(options.carried, group)(options.rows, 0, self.device)
        self.handler = self.make_handler()
        self.models = {name: transformer(LOADS[name], self.device.type) for name in options.loads}

    def batch(self) -> Any:
        """Return a decode batch as far as the handler looks."""
        import numpy as np

        rows = self.options.rows
        index = np.arange(rows)
        return SimpleNamespace(
            num_reqs=rows, idx_mapping=self.torch.arange(rows, device=self.device), idx_mapping_np=index,
            num_draft_tokens=0, num_computed_tokens_np=np.full(rows, 9), num_scheduled_tokens=np.ones(rows, dtype=int),
            prefill_len_np=np.full(rows, 5), max_seq_len_np=np.full(rows, 99),
            is_prefilling_np=np.zeros(rows, dtype=bool),
        )  # fmt: skip

    def run(self, load: str, arm: str) -> tuple[Row, list[Any], list[Any]]:
        """Run one arm once; return its row, what was consumed or sent, step by step, and the collectives."""
        from trtllm_pp_progress.vllm._adapter import Receiver

        torch, dist, handler, size = self.torch, self.dist, self.handler, self.size
        spans, ledger, batch = Spans(torch), [], self.batch()
        handler.queue.clear()
        handler.queue.extend([] if self.last else [None] * size)
        receiver = None
        if arm not in ("none", "immediate") and not self.last:
            delay = arm.removeprefix("post-model ")
            receiver = Receiver(handler, size - 1 - self.rank if arm == "rank-aware" else int(delay))
            receiver.activate()
        stock = dist.broadcast

        def broadcast(tensor: Any, src: Any = None, group: Any = None, **more: Any) -> Any:
            if group is not handler.broadcast_group:
                return stock(tensor, src, group, **more)
            ledger.append((tuple(tensor.shape), str(tensor.dtype)))
            start = spans.start()
            answer = stock(tensor, src, group, **more)
            spans.stop("broadcast", start)
            return answer

        dist.broadcast = broadcast
        try:
            dist.barrier(self.talk)
            since = time.perf_counter()
            results = self._steps(spans, batch, load, arm)
            if receiver:
                receiver.deactivate("end")
            self._rest()
            wall = time.perf_counter() - since
        finally:
            dist.broadcast = stock
        values = [(step, tensor.flatten().tolist()) for step, tensor in results]
        ages = receiver.tally.ages() if receiver else {}
        age = sum(age * count for age, count in ages.items()) / max(sum(ages.values()), 1)
        skip = 2 * size
        kinds = len(ledger) // max(len({step for step, _ in results}), 1) or 1
        row = Row(
            load, arm, self.rank, wall * 1e3 / self.options.steps, spans.mean("model", skip),
            kinds * spans.mean("broadcast", kinds * skip), spans.mean("wait", skip), age, 0,
        )  # fmt: skip
        return row, values, ledger

    def _rest(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()
        else:
            self.handler.broadcast_stream.synchronize()
        self.dist.barrier(self.talk)

    def _steps(self, spans: Spans, batch: Any, load: str, arm: str) -> list[Any]:
        """Run the steps; return (step, tokens) of what was consumed, or sent where this is the last rank."""
        torch, dist, rows, handler = self.torch, self.dist, self.options.rows, self.handler
        model, results, sends = self.models[load], [], []
        fed_back = torch.arange(rows, device=self.device)
        carried = torch.zeros(rows, dtype=torch.int64, device=self.device)
        ones, none = (torch.full((rows,), n, dtype=torch.int32, device=self.device) for n in (1, 0))
        for step in range(self.options.steps + 2 * self.size):
            for work in sends:
                work.wait()
            start = spans.start()
            outputs = handler.get_prev_sampled_outputs() if arm != "none" else None
            spans.stop("wait", start)
            if outputs is not None:
                fed_back = outputs["sampled_tokens"][:, 0] * outputs["num_sampled"]
                results.append((step - self.size, fed_back.clone()))
            if self.rank:
                dist.irecv(carried, src=self.rank - 1).wait()
            start = spans.start()
            model()
            spans.stop("model", start)
            state = ((carried if self.rank else fed_back) * 31 + self.rank + step) % MODULUS
            sends = [] if self.last else [dist.isend(state, dst=self.rank + 1)]
            if arm == "none":
                continue
            if self.last:
                results.append((step, state.clone()))
                handler.broadcast(state[:, None], ones, none, batch)
            else:
                handler.receive(batch, False)
        for work in sends:
            work.wait()
        return results

    def source(self) -> list[dict[str, Any]]:
        """Measure the source's broadcasts while no receiver has posted its own; an answer on the last rank alone."""
        torch, dist, found = self.torch, self.dist, []
        stream, group = self.handler.broadcast_stream, self.handler.broadcast_group
        for outstanding in OUTSTANDING:
            tensors = [
                torch.zeros(self.options.rows, dtype=torch.int64, device=self.device) for _ in range(outstanding)
            ]
            self._rest()
            spans, done = Spans(torch), 0
            if not self.last:
                time.sleep(LATE_S)
            with torch.cuda.stream(stream):
                for tensor in tensors:
                    start = spans.start()
                    dist.broadcast(tensor, self.size - 1, group)
                    spans.stop("broadcast", start)
            if self.last:
                time.sleep(LATE_S / 2)
                done = sum(end.query() for _, end in spans.pairs["broadcast"])
            self._rest()
            times = [start.elapsed_time(end) for start, end in spans.pairs["broadcast"]]
            if self.last:
                found.append({"outstanding": outstanding, "done": done, "first_ms": times[0], "last_ms": times[-1]})
        return found


def measure(stage: Stage) -> dict[str, Any]:
    """Run everything; return, on rank 0, rows, the source's rows, and what is wrong."""
    options, wrong = stage.options, []
    runs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    expected: dict[tuple[str, int], Any] = {}
    stage.run(options.loads[0], "immediate")  # creates the communicators
    for number in range(options.rounds):
        for load in options.loads:
            for arm in arms(stage.size):
                row, values, ledger = stage.run(load, arm)
                said: list[Any] = [None] * stage.size
                stage.dist.all_gather_object(said, (values, ledger), group=stage.talk)
                sent = dict(said[-1][0])
                where = f"{load}, {arm}, round {number}, rank {stage.rank}"
                if arm == "none":
                    pass
                elif ledger != said[-1][1]:
                    wrong.append(f"{where}: collectives differ from the last rank's")
                elif not stage.last:
                    row.wrong = sum(sent.get(step) != tokens for step, tokens in values)
                    row.wrong += values != expected.setdefault((load, number), values)
                    row.wrong += len(values) != options.steps + stage.size
                    if row.wrong:
                        wrong.append(f"{where}: {row.wrong} consumed results are not what was sent")
                runs[load, arm].append(row)
                if stage.rank == 0:
                    print(f"{load}, {arm}: {row.step_ms:.3f} ms a step", file=sys.stderr, flush=True)
    rows = [_median(found) for found in runs.values()]
    everybody: list[Any] = [None] * stage.size
    stage.dist.all_gather_object(everybody, (rows, stage.source(), wrong), group=stage.talk)
    return {
        "rows": [asdict(row) for rows, _, _ in everybody for row in rows],
        "source": [found for _, source, _ in everybody for found in source],
        "wrong": [word for _, _, words in everybody for word in words],
    }


def _median(rows: list[Row]) -> Row:
    middle = asdict(rows[0])
    for name in ("step_ms", "model_ms", "broadcast_ms", "wait_ms", "age"):
        middle[name] = statistics.median(getattr(row, name) for row in rows)
    return Row(**{**middle, "wrong": sum(row.wrong for row in rows)})


def table(found: dict[str, Any]) -> str:
    """Return what was found as text."""
    order = arms(1 + max(row["rank"] for row in found["rows"]))
    lines = [
        f"{'load':>8} {'arm':>12} {'rank':>4} {'step':>8} {'model':>8} {'broadcast':>9} {'wait':>8} {'age':>5} #wrong"
    ]
    lines += [
        f"{row['load']:>8} {row['arm']:>12} {row['rank']:>4} {row['step_ms']:>8.3f} {row['model_ms']:>8.3f} "
        f"{row['broadcast_ms']:>9.3f} {row['wait_ms']:>8.3f} {row['age']:>5.2f} {row['wrong']:>6}"
        for row in sorted(found["rows"], key=lambda row: (row["load"], order.index(row["arm"]), row["rank"]))
    ]
    lines += ["", f"{'outstanding':>11} {'done':>5} {'first ms':>9} {'last ms':>8}"]
    lines += [
        f"{row['outstanding']:>11} {row['done']:>5} {row['first_ms']:>9.3f} {row['last_ms']:>8.3f}"
        for row in found["source"]
    ]
    return "\n".join(lines)


def options_from(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="vLLM's PPHandler over NCCL, with receives posted when each arm says.")
    parser.add_argument("--carried", type=Path, required=True, help="a folder with vLLM's pp_utils.py")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=["decode", "prefill"])
    parser.add_argument("--rows", type=int, default=256, help="requests in a result")
    parser.add_argument("--steps", type=int, default=100, help="measured steps of one run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of every arm; medians are reported")
    parser.add_argument("--meeting", default="env://", help="where the ranks meet; file:///tmp/NAME under mpirun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="where rank 0 writes rows and versions as JSON")
    options = parser.parse_args(argv)
    if not (options.carried / "pp_utils.py").is_file():
        parser.error(f"--carried {options.carried}: no pp_utils.py in it")
    if min(options.rows, options.steps, options.rounds) < 1:
        parser.error("--rows, --steps and --rounds: at least 1")
    return options


def place() -> tuple[int, int, int]:
    """Return rank, size and local rank, as torchrun, Open MPI or MPICH gives them; SystemExit where none does."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"),
                  ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
                  ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")):  # fmt: skip
        if all(name in os.environ for name in names):
            rank, size, local = (int(os.environ[name]) for name in names)
            if size < 2:
                raise SystemExit("receive_nccl: at least 2 ranks, one GPU each")
            return rank, size, local
    raise SystemExit("receive_nccl: start it with torchrun or mpirun")


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0, 1 where a result or the order of collectives is wrong, 2 where GPUs are missing."""
    options = options_from(argv)
    rank, size, local = place()
    import torch
    import torch.distributed as dist

    if options.device == "cuda":
        if torch.cuda.device_count() <= local:
            print(f"receive_nccl: {torch.cuda.device_count()} GPUs for local rank {local}: one each", file=sys.stderr)
            return 2
        torch.cuda.set_device(local)
    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=options.meeting, rank=rank, world_size=size, timeout=timedelta(seconds=90)
    )
    since = time.monotonic()
    with torch.inference_mode():
        found = measure(Stage(options, rank, size))
    if rank == 0:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if options.device == "cuda" else None
        about = {"schema": SCHEMA, "device": name, "ranks": size, "torch": torch.__version__, "nccl": nccl,
                 "seconds": round(time.monotonic() - since, 1)}  # fmt: skip
        print(f"# {size} x {name}, torch {torch.__version__}, NCCL {nccl}, {about['seconds']} s")
        print(table(found))
        print("\n".join(f"# WRONG {word}" for word in found["wrong"]) or "# every result and every order is right")
        if options.output:
            options.output.write_text(json.dumps(about | found, indent=2) + "\n")
    dist.destroy_process_group()
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
