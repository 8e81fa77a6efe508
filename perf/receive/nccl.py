"""Several GPUs: vLLM's own PPHandler on a real NCCL group, with its receives posted at every delay.

    mkdir carried && unzip -p vllm-0.33.0*.whl vllm/v1/worker/gpu/pp_utils.py > carried/pp_utils.py
    torchrun --nproc-per-node 2 perf/__main__.py receive-nccl --carried carried --output nccl.json
    mpirun -n 4 python perf receive-nccl --carried carried --meeting file:///tmp/meeting --output nccl.json

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
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import output
from receive.loads import LOADS
from receive.nccl_stage import Row, Stage


def arms(size: int) -> list[str]:
    """Return the names of what is compared on that many ranks, in order."""
    return ["none", "immediate", *(f"post-model {delay}" for delay in range(1, size)), "rank-aware"]


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
    rows = sorted(found["rows"], key=lambda row: (row["load"], order.index(row["arm"]), row["rank"]))
    cells = [
        (row["load"], row["arm"], str(row["rank"]), f"{row['step_ms']:.3f}", f"{row['model_ms']:.3f}",
         f"{row['broadcast_ms']:.3f}", f"{row['wait_ms']:.3f}", f"{row['age']:.2f}", str(row["wrong"]))
        for row in rows
    ]  # fmt: skip
    source = [
        (str(row["outstanding"]), str(row["done"]), f"{row['first_ms']:.3f}", f"{row['last_ms']:.3f}")
        for row in found["source"]
    ]
    columns = ("load", "arm", "rank", "step", "model", "broadcast", "wait", "age", "#wrong")
    units = ("", "", "", "ms", "ms", "ms", "ms", "steps", "")
    ranks = output.table(columns, cells, units, left=2)
    return ranks + "\n\n" + output.table(("outstanding", "done", "first ms", "last ms"), source, left=0)


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
                raise SystemExit("receive-nccl: at least 2 ranks, one GPU each")
            return rank, size, local
    raise SystemExit("receive-nccl: start it with torchrun or mpirun")


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0, 1 where a result or the order of collectives is wrong, 2 where GPUs are missing."""
    options = options_from(argv)
    rank, size, local = place()
    import torch
    import torch.distributed as dist

    if options.device == "cuda":
        if torch.cuda.device_count() <= local:
            print(f"receive-nccl: {torch.cuda.device_count()} GPUs for local rank {local}: one each", file=sys.stderr)
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
        about = {"device": name, "ranks": size, "torch": torch.__version__, "nccl": nccl,
                 "seconds": round(time.monotonic() - since, 1)}  # fmt: skip
        print(f"# {size} x {name}, torch {torch.__version__}, NCCL {nccl}, {about['seconds']} s")
        print(table(found))
        print("\n".join(f"# WRONG {word}" for word in found["wrong"]) or "# every result and every order is right")
        if options.output:
            output.write(options.output, **about, **found)
    dist.destroy_process_group()
    return 1 if found["wrong"] else 0
