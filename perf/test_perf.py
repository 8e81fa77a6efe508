"""Upstream's performance case on the best engine present, as a test and as a command.

    mpirun -n 4 python -m pytest perf/test_perf.py                      # the published case
    mpirun -n 4 python perf/test_perf.py --engine host-cpu              # without pytest
    python perf/test_perf.py CASE --requests 4 --output 200 --json result.json      # starts mpirun itself

A failing rank ends the run for all. perf/README.md has the commands, what is measured and what is not.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from perf_case import engines, trtllm, verdict  # noqa: E402
from perf_case.case import PUBLISHED, Case, CaseError, parse, scaled  # noqa: E402

from trtllm_pp_progress.bench._launch import TRANSPORTS, launch, under_mpi  # noqa: E402
from trtllm_pp_progress.cli import Names, check_world, run_command  # noqa: E402

POLICIES = ("regressed", "flush", "oneshot", "iprobe", "patched")
# What a CPU can do in a minute. The link's copies and the ranks' threads share the cores, so the stage's host work is
# made longer than upstream's 0.7 ms, to stand out from what two cores add.
ON_CPU = {"model": "qwen3-random:tiny", "scale": 0.01, "requests": 2, "output": 40, "host_work_ms": 4.0}

STACKS_S = 15.0  # more for the launcher than for the ranks: one that is stuck shows its stacks first


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("case_id", metavar="[CASE]", default=PUBLISHED)
@click.option("--engine", default="auto", show_default=True, help=f"auto, {', '.join(engines.ENGINES)}.")
@click.option("--model", help="A Qwen3 checkpoint directory or qwen3-random:SIZE; random weights by default.")
@click.option("--scale", type=float, help="Shorten the prompt to this part of it.")
@click.option("--requests", type=int, help="Fewer requests than the case has.")
@click.option("--output", type=int, help="Fewer output tokens than the case has.")
@click.option("--policies", default=",".join(POLICIES), show_default=True, type=Names("policy", POLICIES))
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1, 100), help="Runs of each, interleaved.")
@click.option("--link", default="auto", show_default=True, type=click.Choice(["auto", "shared", "ipc", "nccl"]))
@click.option(
    "--host-work-ms", type=click.FloatRange(0, 1000), help="PyExecutor's own Python in a step that has a batch."
)
@click.option("--hold-gil", is_flag=True, help="Keep the GIL throughout that work; else it is given up now and then.")
@click.option(
    "--payload", default=65536, show_default=True, type=click.IntRange(0, 1 << 30), help="Sample state, bytes."
)
@click.option(
    "--compare", default=32, show_default=True, type=click.IntRange(0), help="Tokens checked with the unsplit model."
)
@click.option("--transport", default="tcp", show_default=True, type=click.Choice(list(TRANSPORTS)))
@click.option(
    "--check", type=click.Choice(["threshold", "tokens"]), help="What fails a run; on host-cpu the tokens alone."
)
@click.option("--good", type=click.FloatRange(0), help="trtllm: tokens/s of a build before the regression.")
@click.option("--timeout", default=900.0, show_default=True, type=click.FloatRange(1), help="Seconds for everything.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here.")
def main(case_id: str, timeout: float, transport: str, **options: Any) -> None:
    """Run CASE, an id as upstream's tests have it, and exit with 1 if it fails."""
    try:
        case = parse(case_id)
        failures = execute(case, sys.argv[1:], transport=transport, timeout=timeout, **options)
    except CaseError as error:
        raise click.ClickException(str(error)) from None
    raise SystemExit(bool(failures))


def execute(case: Case, arguments: list[str], *, transport: str, timeout: float, **options: Any) -> list[str]:
    """Run a case as this process can: as a rank, through trtllm-bench, or by starting this file with `arguments`.

    Returns what failed, on every rank.
    """
    engine = engines.choose(options.pop("engine"), case, engines.look())
    good, json_file = options.pop("good"), options.pop("json_file")
    if engine == "trtllm":
        run, reduced = scaled(case, options["scale"] or 1, options["requests"], options["output"])
        return _trtllm(case, run, reduced, options["model"], options["repeat"], good, timeout, json_file)
    if not under_mpi(os.environ):
        code = launch(case.pp, transport, [str(Path(__file__)), *arguments], timeout + STACKS_S)
        return [f"the ranks ended with {code}"] if code else []
    from mpi4py import MPI

    check_world(MPI.COMM_WORLD, case.pp)
    faulthandler.dump_traceback_later(timeout, exit=True)  # a rank that exits ends the others
    try:
        return together(
            MPI.COMM_WORLD, lambda: _as_rank(MPI.COMM_WORLD, case, engine, transport, json_file=json_file, **options)
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


def together(comm: Any, function: Callable[[], Any]) -> Any:
    """Call a function on every rank; an error on one ends all, for the others wait for it. Bad input is on all."""
    from decoder import ModelError
    from perf_case.links import LinkError
    from perf_case.measure import abort_on_thread_errors

    abort_on_thread_errors(comm)
    try:
        return function()
    except (CaseError, ModelError, LinkError) as error:
        raise CaseError(str(error)) from None
    except BaseException:
        if comm.Get_size() > 1:
            traceback.print_exc()
            sys.stderr.flush()
            comm.Abort(1)
        raise


def _as_rank(
    comm: Any,
    case: Case,
    engine: str,
    transport: str,
    *,
    model: str | None,
    scale: float | None,
    requests: int | None,
    output: int | None,
    policies: list[str],
    repeat: int,
    link: str,
    host_work_ms: float | None,
    hold_gil: bool,
    payload: int,
    compare: int,
    check: str | None,
    json_file: Path | None,
) -> list[str]:
    import decoder
    import torch
    from perf_case import evidence, links
    from perf_case.figure import middle
    from perf_case.measure import Load, groups, run
    from perf_case.model import StaticModel, generate
    from perf_case.report import print_result
    from perf_case.stage import CaseStage

    from trtllm_pp_progress.bench._floor import quiet_barrier
    from trtllm_pp_progress.bench._report import console, environment

    gpu = engine == "host-gpu"
    given = {"model": model, "scale": scale, "requests": requests, "output": output, "host_work_ms": host_work_ms}
    full = {"model": "qwen3-random:0.6b", "scale": 1.0, "requests": None, "output": None, "host_work_ms": 0.0}
    chosen: dict[str, Any] = {
        name: value if value is not None else (full if gpu else ON_CPU)[name] for name, value in given.items()
    }
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
    say = console(sys.stderr).print if rank == 0 else lambda *_: None
    say(f"{engine}: " + ("the case as it is" if not reduced else "scaled: " + ", ".join(reduced)))

    torch.set_num_threads(1 if not gpu else 4)
    batch = groups(asked.concurrency, size)
    device = f"cuda:{rank % torch.cuda.device_count()}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    if link == "auto":
        link = "shared" if not gpu else "nccl" if torch.cuda.device_count() >= size else "ipc"
    length = asked.input_len + asked.output_len + 8
    prompts = engines.prompts(asked.requests, asked.input_len, spec.vocabulary)
    expected: list[list[int]] = []
    if rank == 0 and compare:
        some, count = prompts[:batch], min(compare, asked.output_len)
        if gpu:
            expected = generate(spec, some, count, batch=batch, length=length, device=device, dtype=dtype)
            torch.cuda.empty_cache()
        else:
            expected = decoder.generate(spec, some, count)
    quiet_barrier(comm)
    stage_model = StaticModel(spec, rank, size, slots=asked.concurrency, length=length, device=device, dtype=dtype)
    before, after = links.connect(link, comm, stage_model.hidden, stage_model.dtype, stage_model.device)
    stage = CaseStage(stage_model, before, after, payload, asked.concurrency)
    load = Load(prompts, asked.output_len, asked.concurrency, batch, chosen["host_work_ms"] * 1e-3, hold_gil)

    rows: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
    tokens: dict[str, list[list[list[int]]]] = {policy: [] for policy in policies}
    for repetition in range(repeat):
        for policy in policies:
            if (outcome := run(comm, policy, stage, load)) is not None:
                rows[policy].append(evidence.summarise(outcome))
                tokens[policy].append(outcome.tokens)
                say(f"{repetition + 1}/{repeat} {policy}: {outcome.tokens_per_s:.2f} tokens/s")
    comm.Barrier()
    stage.close()
    failures: list[str] = []
    if rank == 0:
        for runs in rows.values():
            shown = middle(runs)
            for row in runs:
                row["shown"] = row["shown"] if row is shown else []  # one run a policy is looked at
        wrong = {policy: sum(row["wrong"] for row in runs) for policy, runs in rows.items()}
        failures = verdict.token_failures(tokens, expected, wrong)
        judged = verdict.threshold_failures(rows, kernels=gpu) if "flush" in rows else []
        if (check or ("threshold" if gpu else "tokens")) == "threshold":
            failures += judged
        described = environment(transport) | {"torch": torch.__version__}
        if gpu:
            described |= {
                "gpus": torch.cuda.device_count(),
                "gpu": torch.cuda.get_device_name(),
                "cuda": torch.version.cuda,
            }
        written = {
            "schema": 1, "environment": described, "case": case.id, "run": asked.id, "scaled": reduced,
            "engine": engine, "model": spec.name, "pp": size, "link": link, "transport": transport, "batch": batch,
            "host_work_ms": chosen["host_work_ms"], "hold_gil": hold_gil, "payload_bytes": payload,
            "compared_tokens": sum(map(len, expected)),
            "failures": failures, "judged": judged, "rows": rows,
        }  # fmt: skip
        print_result(written)
        if json_file is not None:
            json_file.write_text(json.dumps(written) + "\n", encoding="utf-8")
    sys.stdout.flush()
    quiet_barrier(comm)
    return list(comm.bcast(failures))


def _trtllm(
    case: Case,
    asked: Case,
    reduced: list[str],
    model: str | None,
    repeat: int,
    good: float | None,
    timeout: float,
    json_file: Path | None,
) -> list[str]:
    """Run TensorRT-LLM without and with the patch; without `good`, the patched run must be the faster one."""
    with tempfile.TemporaryDirectory() as folder:
        rows = trtllm.run(asked, Path(folder), None if model is None else Path(model), repeat, timeout)
    if good is not None:
        failures = verdict.threshold_failures(rows | {"flush": [{"tokens_per_s": good}]}, kernels=False)
    else:
        rate = {policy: statistics.median(row["tokens_per_s"] for row in runs) for policy, runs in rows.items()}
        failures = [] if rate["patched"] > rate["regressed"] else ["patched is not faster than regressed"]
    for policy, runs in rows.items():
        click.echo(f"{policy}: {', '.join(format(row['tokens_per_s'], '.2f') for row in runs)} tokens/s")
    for line in [f"scaled: {', '.join(reduced)}"] * bool(reduced) + [f"FAILED: {failure}" for failure in failures]:
        click.echo(line)
    if json_file is not None:
        written = {"schema": 1, "case": case.id, "run": asked.id, "scaled": reduced, "engine": "trtllm", "rows": rows}
        json_file.write_text(json.dumps(written | {"failures": failures}) + "\n", encoding="utf-8")
    return failures


def test_perf(perf_case: str, perf_arguments: list[str]) -> None:
    """Every relay gives the unsplit model's tokens; the patch is above upstream's threshold, the regression below."""
    line = [perf_case, *perf_arguments]
    options = main.make_context("test_perf", list(line)).params
    assert execute(parse(options.pop("case_id")), line, **options) == []


if __name__ == "__main__":
    run_command(main)
