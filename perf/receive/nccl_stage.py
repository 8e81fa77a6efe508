"""One rank of the measurement over NCCL: its groups, its model, its steps, and how long each part takes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from receive.carried import handler_class
from receive.loads import LOADS, transformer

__all__ = ["Row", "Spans", "Stage"]

MODULUS = 50_021
OUTSTANDING = range(1, 13)
LATE_S = 0.05  # how long the receivers of the source's measurement keep it waiting


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
        from trtllm_pp_progress.vllm.receiver import Receiver

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
        kinds = len(ledger) // max(len({step for step, _ in results}), 1) or 1
        return self._row(load, arm, wall, spans, kinds, ages), values, ledger

    def _row(self, load: str, arm: str, wall_s: float, spans: Spans, kinds: int, ages: dict[int, int]) -> Row:
        """Reduce a run to its row; `kinds` is how many broadcasts a step makes."""
        skip = 2 * self.size
        return Row(
            load=load,
            arm=arm,
            rank=self.rank,
            step_ms=wall_s * 1e3 / self.options.steps,
            model_ms=spans.mean("model", skip),
            broadcast_ms=kinds * spans.mean("broadcast", kinds * skip),
            wait_ms=spans.mean("wait", skip),
            age=sum(age * count for age, count in ages.items()) / max(sum(ages.values()), 1),
            wrong=0,
        )

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
