"""The pipeline with a real model: every relay policy on the same prompts, tokens compared with the unsplit model.

    python perf/pipeline.py --model smollm2                # starts mpirun itself, four stages
    python perf/pipeline.py --model DIR --policies flush,patched --requests 4 --json result.json
    python perf/pipeline.py --model qwen3-random:tiny --pp 2

Every rank holds only its stage. Activations pass outside MPI (gloo), the sample state over the MPI ring.
docs/measuring.md defines the columns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

import decoder
import output
from decoder import payload as payloads
from trtllm_pp_progress.tools.bench.scenarios import POLICY_NAMES
from trtllm_pp_progress.tools.job.launch import TRANSPORTS, rank_or_launch
from trtllm_pp_progress.tools.job.options import JSON_FILE, Finite, Names, run_command
from trtllm_pp_progress.tools.job.world import world
from verdict import THRESHOLD, Verdict

PROMPTS = (
    "The three primary colours are",
    "To make a cup of tea, first",
    "Once upon a time there was a small robot who",
    "The capital of France is",
    "Water boils at",
    "In the middle of the night,",
    "A computer program is",
    "The largest planet in the solar system is",
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model", default="smollm2", show_default=True, help="smollm2, a checkpoint directory, or qwen3-random[:SIZE]."
)
@click.option("--pp", default=4, show_default=True, type=click.IntRange(2, 64), help="Pipeline stages, one rank each.")
@click.option(
    "--policies", default="regressed,flush,oneshot,patched", show_default=True, type=Names("policy", POLICY_NAMES)
)
@click.option("--requests", default=2, show_default=True, type=click.IntRange(1, len(PROMPTS)), help="Prompts.")
@click.option("--concurrency", default=1, show_default=True, type=click.IntRange(1), help="Requests in flight.")
@click.option("--max-tokens", default=24, show_default=True, type=click.IntRange(10, 4096), help="Tokens a request.")
@click.option(
    "--payload",
    default="logits",
    show_default=True,
    help="none, logits, or a number of bytes: what travels beside the tokens.",
)
@click.option("--reentry-ms", default=250.0, show_default=True, type=Finite(0.01, 60_000), help="Re-entry period.")
@click.option("--transport", default="tcp", show_default=True, type=Names("transport", tuple(TRANSPORTS)))
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1, 100), help="Runs of each, interleaved.")
@click.option("--timeout", default=900.0, show_default=True, type=Finite(1), help="Seconds for the ranks.")
@click.option("--json", "json_file", type=JSON_FILE, help="Write rows and samples here.")
@click.option("--expect-recovery", is_flag=True, help="Judge: regressed below the threshold, patched above it.")
def main(model: str, pp: int, transport: list[str], timeout: float, **options: Any) -> None:
    """Run the pipeline with each policy and print one table.

    Exit code 0: passed; 1: failed; 2: bad input; 3: inconclusive, for the regressed relay lost too little.
    """
    if options["expect_recovery"] and not {"regressed", "flush", "patched"} <= set(options["policies"]):
        raise click.ClickException("--expect-recovery needs the policies regressed, flush and patched")
    try:
        payloads.parse(options["payload"])
        spec = decoder.prepare(model)
        decoder.cut(spec, pp)
    except (decoder.ModelError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    rank_or_launch(pp, transport[0], sys.argv, timeout, options["json_file"])
    with world(pp) as comm:
        code = _as_rank(comm, spec, transport[0], **options)
    raise SystemExit(code)


def _as_rank(
    comm: Any,
    spec: decoder.Spec,
    transport: str,
    policies: list[str],
    requests: int,
    concurrency: int,
    max_tokens: int,
    payload: str,
    reentry_ms: float,
    repeat: int,
    json_file: Path | None,
    expect_recovery: bool,
) -> int:
    from trtllm_pp_progress.tools.bench.measure import interleaved, run
    from trtllm_pp_progress.tools.bench.rows import Outcome
    from trtllm_pp_progress.tools.host import own_address
    from trtllm_pp_progress.tools.job.console import console
    from trtllm_pp_progress.tools.job.environment import environment
    from trtllm_pp_progress.tools.job.hosts import hosts_of_ranks
    from trtllm_pp_progress.tools.job.ranks import quiet_barrier

    rank, size = comm.Get_rank(), comm.Get_size()
    progress = console(sys.stderr)
    prompts, expected = None, None
    model = decoder.StageModel(spec, rank, size)  # torch is imported for it on all ranks at once; weights are read once
    if rank == 0:
        text = decoder.Text(spec)
        prompts = [text.encode(prompt) for prompt in PROMPTS[:requests]]
        started = time.perf_counter()
        expected = decoder.generate(spec, prompts, max_tokens)
        rate = max_tokens * len(prompts) / (time.perf_counter() - started)
        progress.print(f"unsplit, by transformers: {rate:.2f} tokens/s")
    quiet_barrier(comm)
    prompts = comm.bcast(prompts)
    here = own_address(comm, hosts := hosts_of_ranks(comm))
    rendezvous: list[Any] = []  # one a pipeline, on rank 0

    def make_stage() -> Any:
        if rank == 0:
            rendezvous.append(decoder.Rendezvous(here))
        address = comm.bcast(rendezvous[-1].address if rendezvous else None)
        return decoder.build(model, rank, size, address, here=here, payload=payload)

    def run_once(policy: str) -> Outcome | None:
        return run(comm, policy, make_stage, prompts, max_tokens, concurrency=concurrency, reentry_s=reentry_ms * 1e-3)

    outcomes = interleaved(policies, repeat, run_once, progress.print)
    code = None
    if expected is not None:
        described = environment(transport, hosts) | {"model": spec.name}
        code = _report(spec, prompts, expected, described, outcomes, json_file, expect_recovery)
    quiet_barrier(comm)
    return int(comm.bcast(code))


def _report(
    spec: decoder.Spec,
    prompts: list[list[int]],
    expected: list[list[int]],
    described: dict[str, Any],
    outcomes: dict[str, list[Any]],
    json_file: Path | None,
    expect_recovery: bool,
) -> int:
    """Print text, table and verdict; return the exit code."""
    from trtllm_pp_progress.tools.bench.rows import row
    from trtllm_pp_progress.tools.bench.table import print_table, write_json
    from trtllm_pp_progress.tools.job.console import console

    payload_bytes = max(outcome.payload_bytes for runs in outcomes.values() for outcome in runs)
    rows = [row("pipeline", policy, payload_bytes, runs) for policy, runs in outcomes.items()]
    text = decoder.Text(spec)
    for prompt, tokens in zip(PROMPTS, expected, strict=False):
        print(f"> {prompt}\n  {text.decode(tokens)}\n")
    print(output.described(described))
    print_table(rows, console(sys.stdout))
    if json_file is not None:
        write_json(json_file, rows, described)

    found = judge(rows, outcomes, expected, expect_recovery)
    print(*found.lines("RECOVERED" if expect_recovery else "PASSED"), sep="\n")
    return found.code


def judge(rows: list[Any], outcomes: dict[str, list[Any]], expected: list[list[int]], recovery: bool) -> Verdict:
    """Compare tokens, and with `recovery` the rates: each the median of a policy's runs."""
    differing = [policy for policy, runs in outcomes.items() if any(outcome.tokens != expected for outcome in runs)]
    wrong = sum(row.wrong for row in rows)
    if differing or wrong:
        said = f"tokens are not the unsplit model's with {', '.join(differing) or 'none'}; {wrong} wrong payloads"
        return Verdict(failures=[said])
    print("Tokens are those of the unsplit model with every policy.")
    if not recovery:
        return Verdict()
    rate = {row.policy: row.tokens_per_s for row in rows}
    floor = THRESHOLD * rate["flush"]
    print(
        f"regressed {rate['regressed']:.2f}, patched {rate['patched']:.2f} tokens/s; threshold {floor:.2f} "
        f"({THRESHOLD} of flush, as upstream's test has it)"
    )
    failures = ["the patch did not give the throughput back"] if rate["patched"] < floor else []
    above = rate["regressed"] >= floor
    return Verdict(failures, ["the regressed relay is above the threshold: this run detects nothing"] if above else [])


if __name__ == "__main__":
    run_command(main)
