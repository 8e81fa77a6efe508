"""A/B recipe: vLLM's own benchmark with the receive policy off, before the model and after it, at max_tokens 1 and 2.

    python perf receive-ab --model MODEL --pp 4 --tp 8 --output ab.json

With max_tokens 1 no sampled token has to come back, so the policy must show next to nothing; with 2 the first one must.
At PP2 there is no arm before the model, which is where vLLM posts.
Fixed prompts, end of sequence ignored, prefix cache off, the same concurrency and number of requests in every arm; arms
are interleaved, round by round. Prints the comparison and writes it with the environment, redacted, to --output. Needs
vLLM, this package and the GPUs; `--dry-run` prints the commands alone.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import output

VARIABLE = "TRTLLM_PP_PROGRESS_VLLM_"
SHUTDOWN_LINE = re.compile(r"receive policy at shutdown: (\{.*\})")


@dataclass(frozen=True)
class Arm:
    """One way to run the benchmark."""

    name: str
    environment: dict[str, str]


def arms(pp: int) -> list[Arm]:
    """Return the arms: vLLM as it is, delayed before the model (the same with two ranks: left out), and after it."""
    before = {VARIABLE + "RECEIVE": str(pp - 2)}
    after = {VARIABLE + "RECEIVE": "rank-aware"}
    named = [Arm("immediate", {VARIABLE + "RECEIVE": "off"}), Arm("pre-model", before), Arm("post-model", after)]
    return [arm for arm in named if pp > 2 or arm.name != "pre-model"]


@dataclass
class Run:
    """What one run of one arm gave."""

    arm: str
    max_tokens: int
    requests_per_second: float
    tokens_per_second: float
    workers: list[dict[str, Any]] = field(default_factory=list)  # the policy's own counters, by rank


def command(options: argparse.Namespace, max_tokens: int, results: str) -> list[str]:
    """Return the benchmark's command line."""
    return [
        "vllm", "bench", "throughput", "--model", options.model,
        "--pipeline-parallel-size", str(options.pp), "--tensor-parallel-size", str(options.tp),
        "--dataset-name", "random",
        "--random-input-len", str(options.input_len), "--random-output-len", str(max_tokens),
        "--num-prompts", str(options.requests), "--max-num-seqs", str(options.concurrency), "--seed", str(options.seed),
        "--no-enable-prefix-caching", "--async-scheduling", "--disable-detokenize", "--output-json", results,
        *shlex.split(options.extra),
    ]  # fmt: skip


def parse(arm: str, max_tokens: int, results: str, log: str) -> Run:
    """Read one run's JSON results and the policy's lines in its log; raises ValueError where there are no results."""
    try:
        found = json.loads(results)
        requests, tokens = float(found["requests_per_second"]), float(found["tokens_per_second"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{arm}, max_tokens {max_tokens}: the benchmark wrote no results ({error!r})") from None
    workers = [json.loads(match) for match in SHUTDOWN_LINE.findall(log)]
    return Run(arm, max_tokens, requests, tokens, sorted(workers, key=lambda worker: int(worker["rank"])))


def execute(options: argparse.Namespace, arm: Arm, max_tokens: int) -> Run:
    """Run one arm once, as a child process that is given --timeout seconds."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        words = command(options, max_tokens, str(results))
        child = subprocess.run(
            words, env={**os.environ, **arm.environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=options.timeout, check=False,
        )  # fmt: skip
        if child.returncode:
            raise SystemExit(f"{arm.name}: {words[0]} failed with {child.returncode}\n{redact(child.stdout[-4000:])}")
        return parse(arm.name, max_tokens, results.read_text() if results.exists() else "", child.stdout)


def compare(runs: list[Run]) -> str:
    """Return the table: the median of every arm and what it gains over vLLM as it is."""
    rows = []
    for max_tokens in sorted({run.max_tokens for run in runs}):
        by_arm: dict[str, list[Run]] = {}
        for run in runs:
            if run.max_tokens == max_tokens:
                by_arm.setdefault(run.arm, []).append(run)
        base = statistics.median(run.requests_per_second for run in by_arm["immediate"])
        rows += [_compared(max_tokens, arm, mine, base) for arm, mine in by_arm.items()]
    columns = ("max_tokens", "arm", "req/s", "gain", "spread", "posts", "fallbacks", "waited ms")
    return output.table(columns, rows, left=2)


def _compared(max_tokens: int, arm: str, mine: list[Run], base: float) -> tuple[str, ...]:
    values = [run.requests_per_second for run in mine]
    middle = statistics.median(values)
    counters = [worker["counters"] for run in mine for worker in run.workers if worker["role"] == "receiver"]
    waited = sum((counter["waited"] or {}).get("total_ms", 0.0) for counter in counters)
    gain, spread = middle / base - 1, (max(values) - min(values)) / middle
    posts, fallbacks = (sum(counter[name] for counter in counters) for name in ("posts", "fallbacks"))
    return (
        str(max_tokens), arm, f"{middle:.2f}", f"{gain:+.1%}", f"{spread:.1%}", str(posts), str(fallbacks),
        f"{waited:.1f}",
    )  # fmt: skip


def redact(text: str) -> str:
    """Take out of a text what tells where it comes from: hosts, addresses, users, paths and credentials."""
    secret = r"(?i)\b([\w-]*(?:token|secret|passw(?:or)?d|api_?key|credential)[\w-]*)(\s*[=:]\s*)\S+"
    text = re.sub(secret, r"\1\2<redacted>", text)
    text = re.sub(r"\b(?:hf|ghp|gho|github_pat|sk|nvapi|glpat)[_-][A-Za-z0-9_-]{8,}", "<redacted>", text)
    text = re.sub(r"\b[a-z][a-z0-9+.-]*://\S+", "<url>", text)
    text = re.sub(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b", "<address>", text)
    text = re.sub(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.])", "<address>", text)
    text = re.sub(r"(?i)(?<![\w:])(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{1,4}(?![\w:])", "<address>", text)
    text = re.sub(r"(?<![\w<.])(?:~|\.{1,2})?/(?:[\w.@+-]+/?)+", "<path>", text)
    for name in {socket.gethostname(), socket.gethostname().split(".")[0], _user()} - {"", "root", "localhost"}:
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def environment() -> str:
    """Return vLLM's own description of the machine, redacted; an empty text where it gives none."""
    try:
        child = subprocess.run(["vllm", "collect-env"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return redact(child.stdout)


def options_from(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare receive policies with vLLM's own benchmark.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages, at least 2")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of a stage")
    parser.add_argument("--input-len", type=int, default=615)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="runs of every arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3600, help="of one run, in seconds")
    parser.add_argument("--extra", default="", help="more arguments for the engine, as one string")
    parser.add_argument("--output", type=Path, help="where to write runs and environment as JSON")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args(argv)
    if options.pp < 2:
        parser.error(f"--pp {options.pp}: with one stage there is no receive to place")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the arms and print the comparison; return 0."""
    options = options_from(argv)
    plan = [(arm, tokens) for _ in range(options.rounds) for tokens in (1, 2) for arm in arms(options.pp)]
    if options.dry_run:
        for arm, tokens in plan:
            settings = " ".join(f"{name}={value}" for name, value in arm.environment.items())
            print(settings, shlex.join(command(options, tokens, "results.json")))
        return 0
    runs = []
    for arm, tokens in plan:
        runs.append(execute(options, arm, tokens))
        print(f"# {arm.name}, max_tokens {tokens}: {runs[-1].requests_per_second:.2f} requests/s", file=sys.stderr)
    print(compare(runs))
    if options.output:
        # Not the model's name alone tells where it lies: the command goes through the same redaction.
        said = redact(shlex.join(command(options, 2, "results.json")))
        every = [asdict(run) for run in runs]
        output.write(options.output, command=said, environment=environment(), runs=every)
    return 0
