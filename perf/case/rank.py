"""The performance case as one rank of a host engine runs it: what is asked for, every relay in turn, the result."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import decoder
import output
from case import engines, judge, links
from case.figure import middle
from case.ids import Case, CaseError, scaled
from case.measure import Load, abort_on_thread_errors, groups, run
from case.model import StaticModel, generate
from case.native_peer import build
from case.relays import needs_compiler
from case.report import print_result
from case.rounds import Rows, Tokens, rounds, run_all
from case.stage import CaseStage
from trtllm_pp_progress.tools.job.console import console
from trtllm_pp_progress.tools.job.environment import environment
from trtllm_pp_progress.tools.job.ranks import quiet_barrier
from verdict import Verdict

__all__ = ["as_rank", "together"]

# What a CPU can do in a minute. The link's copies and the ranks' threads share the cores, so the stage's host work is
# made longer than upstream's 0.7 ms, to stand out from what two cores add.
ON_CPU = {"model": "qwen3-random:tiny", "scale": 0.01, "requests": 2, "output": 40, "host_work_ms": 4.0}
ON_GPU = {"model": "qwen3-random:0.6b", "scale": 1.0, "requests": None, "output": None, "host_work_ms": 0.0}


def together(comm: Any, function: Callable[[], Any]) -> Any:
    """Call a function on every rank; an error on one ends all, for the others wait for it. Bad input is on all."""
    abort_on_thread_errors(comm)
    try:
        return function()
    except (CaseError, decoder.ModelError, links.LinkError) as error:
        raise CaseError(str(error)) from None
    except BaseException:
        if comm.Get_size() > 1:
            traceback.print_exc()
            sys.stderr.flush()
            comm.Abort(1)
        raise


@dataclass(frozen=True)
class Plan:
    """What is run here of a case: `asked` is the case as it was scaled, `reduced` says how, in words."""

    case: Case
    asked: Case
    reduced: list[str]
    engine: str
    spec: decoder.Spec
    device: str
    dtype: str
    link: str
    batch: int
    host_work_ms: float

    @property
    def gpu(self) -> bool:
        """Whether stages run on a GPU."""
        return self.engine == "host-gpu"

    @property
    def length(self) -> int:
        """Positions that a request may come to need."""
        return self.asked.input_len + self.asked.output_len + 8


def as_rank(
    comm: Any,
    case: Case,
    engine: str,
    transport: str,
    *,
    policies: list[str],
    repeat: int,
    seconds: float | None,
    hold_gil: bool,
    payload: int,
    compare: int,
    check: str | None,
    json_file: Path | None,
    **options: Any,
) -> Verdict:
    """Run every policy, `repeat` times over, and return the verdict, on every rank; collective."""
    plan = _plan(comm, case, engine, **options)
    say = console(sys.stderr).print if comm.Get_rank() == 0 else lambda *_: None
    say(f"{engine}: " + ("scaled: " + ", ".join(plan.reduced) if plan.reduced else "the case as it is"))
    prompts = engines.prompts(plan.asked.requests, plan.asked.input_len, plan.spec.vocabulary)
    expected = _unsplit(plan, prompts[: plan.batch], compare) if comm.Get_rank() == 0 and compare else []
    if any(map(needs_compiler, policies)):
        build()
    quiet_barrier(comm)
    stage = _stage(comm, plan, payload)
    in_flight = plan.asked.concurrency
    load = Load(prompts, plan.asked.output_len, in_flight, plan.batch, plan.host_work_ms * 1e-3, hold_gil)
    each = partial(run, comm, stage=stage, load=load)
    rows, tokens = run_all(each, rounds(comm, policies, repeat, seconds), say)
    comm.Barrier()
    stage.close()
    found = None
    if comm.Get_rank() == 0:
        found, judged = _judge(rows, tokens, expected, plan.gpu, check or ("threshold" if plan.gpu else "tokens"))
        written = {
            "environment": _environment(transport, plan.gpu), "case": case.id, "run": plan.asked.id,
            "scaled": plan.reduced, "engine": engine, "model": plan.spec.name, "pp": comm.Get_size(),
            "link": plan.link, "transport": transport, "batch": plan.batch, "host_work_ms": plan.host_work_ms,
            "hold_gil": hold_gil, "payload_bytes": payload, "compared_tokens": sum(map(len, expected)),
            "failures": found.failures, "inconclusive": found.inconclusive, "judged": judged, "rows": rows,
        }  # fmt: skip
        print_result(written, found)
        if json_file is not None:
            output.write(json_file, **written)
    sys.stdout.flush()
    quiet_barrier(comm)
    return comm.bcast(found)  # type: ignore[no-any-return]


def _plan(
    comm: Any,
    case: Case,
    engine: str,
    *,
    model: str | None,
    scale: float | None,
    requests: int | None,
    output: int | None,
    link: str,
    host_work_ms: float | None,
) -> Plan:
    """Settle what is run: what was asked for, else the engine's own; raises CaseError, ModelError."""
    gpu = engine == "host-gpu"
    given = {"model": model, "scale": scale, "requests": requests, "output": output, "host_work_ms": host_work_ms}
    default = ON_GPU if gpu else ON_CPU
    chosen: dict[str, Any] = {name: default[name] if value is None else value for name, value in given.items()}
    if not gpu:  # a scale is a limit: a case may have less
        chosen["requests"] = requests or min(case.requests, max(chosen["requests"], case.concurrency))
        chosen["output"] = output or min(case.output_len, chosen["output"])
    asked, reduced = scaled(case, chosen["scale"], chosen["requests"], chosen["output"])
    spec = decoder.prepare(chosen["model"])
    dtype = case.dtype if gpu else "float32"
    if spec.config.get("hidden_size") != 1024 or spec.layers != 28:
        reduced.append(f"model {spec.name} ({spec.layers} layers of {spec.config['hidden_size']})")
    if dtype != case.dtype:
        reduced.append(f"{dtype} instead of {case.dtype}")
    rank, size = comm.Get_rank(), comm.Get_size()
    torch.set_num_threads(4 if gpu else 1)
    device = "cpu"
    if gpu:
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    if link == "auto":
        link = "shared" if not gpu else "nccl" if torch.cuda.device_count() >= size else "ipc"
    batch = groups(asked.concurrency, size)
    return Plan(case, asked, reduced, engine, spec, device, dtype, link, batch, chosen["host_work_ms"])


def _unsplit(plan: Plan, prompts: list[list[int]], compare: int) -> list[list[int]]:
    """Return the first tokens of the unsplit model: transformers' on a CPU, our own stage's on a GPU."""
    count = min(compare, plan.asked.output_len)
    if not plan.gpu:
        return decoder.generate(plan.spec, prompts, count)
    found = generate(
        plan.spec, prompts, count, batch=plan.batch, length=plan.length, device=plan.device, dtype=plan.dtype
    )
    torch.cuda.empty_cache()
    return found


def _stage(comm: Any, plan: Plan, payload: int) -> CaseStage:
    slots = plan.asked.concurrency
    model = StaticModel(
        plan.spec, comm.Get_rank(), comm.Get_size(), slots=slots, length=plan.length, device=plan.device,
        dtype=plan.dtype,
    )  # fmt: skip
    before, after = links.connect(plan.link, comm, model.hidden, model.dtype, model.device)
    return CaseStage(model, before, after, payload, slots)


def _judge(rows: Rows, tokens: Tokens, expected: list[list[int]], gpu: bool, check: str) -> tuple[Verdict, list[str]]:
    """Return the verdict, and what the thresholds say whether or not they count here."""
    for runs in rows.values():
        shown = middle(runs)
        for row in runs:
            row["shown"] = row["shown"] if row is shown else []  # one run a policy is looked at
    wrong = {policy: sum(row["wrong"] for row in runs) for policy, runs in rows.items()}
    failures = judge.token_failures(tokens, expected, wrong)
    said = {
        "threshold": judge.against_threshold(rows, kernels=gpu) if "flush" in rows else Verdict(),
        "pairs": judge.no_harm(rows),
    }
    counts = said.get(check, Verdict())
    judged = [line for each in said.values() for line in (*each.failures, *each.inconclusive)]
    return Verdict(failures + counts.failures, counts.inconclusive), judged


def _environment(transport: str, gpu: bool) -> dict[str, Any]:
    found = environment(transport) | {"torch": torch.__version__}
    if gpu:
        found |= {
            "gpus": torch.cuda.device_count(),
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
        }
    return found
