"""The same case on TensorRT-LLM itself: trtllm-bench under mpirun, without the patch and with it.

Thin on purpose: it builds command lines, runs them and reads the report, which is a JSON file (`--report_json`) or, of
older builds, lines on the terminal. It has not been run against TensorRT-LLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from case.ids import Case

__all__ = ["HUB_NAMES", "ReportError", "commands", "environments", "installed", "read_report", "run"]

HUB_NAMES = {"qwen3_0.6b": "Qwen/Qwen3-0.6B"}
OUTPUT_RATE = re.compile(r"Total Output Throughput \(tokens/sec\):\s*([\d.,]+)")


class ReportError(RuntimeError):
    """A benchmark left no report that can be read; the message says where it was looked for."""


def installed() -> bool:
    """Whether TensorRT-LLM can be imported here, without importing it."""
    return importlib.util.find_spec("tensorrt_llm") is not None


def commands(case: Case, folder: Path, model: Path | None = None) -> tuple[list[str], list[str]]:
    """Return the command lines that make the requests and that run them, the same for every variant.

    `model` is a checkpoint directory; without one the name on the hub is used, which downloads it.
    """
    name = ["trtllm-bench", "--model", HUB_NAMES[case.model]]
    if model is not None:
        name += ["--model_path", str(model)]
    dataset = str(folder / "requests.json")
    prepare = [
        *name, "prepare-dataset", "--output", dataset, "token-norm-dist", "--num-requests", str(case.requests),
        "--input-mean", str(case.input_len), "--input-stdev", "0",
        "--output-mean", str(case.output_len), "--output-stdev", "0",
    ]  # fmt: skip
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    bench = [
        "mpirun", *root, "-n", str(case.gpus), "trtllm-llmapi-launch", *name, "throughput", "--backend", "pytorch",
        "--dataset", dataset, "--pp", str(case.pp), "--tp", "1", "--max_batch_size", str(case.max_batch),
        "--max_num_tokens", str(case.max_tokens), "--concurrency", str(case.concurrency),
        "--num_requests", str(case.requests), "--report_json", str(folder / "report.json"),
    ]  # fmt: skip
    return prepare, bench


def environments() -> dict[str, dict[str, str]]:
    """Return the variables of each variant: the switch that turns the patch on in every worker."""
    return {"regressed": {"TRTLLM_PP_PROGRESS": "0"}, "patched": {"TRTLLM_PP_PROGRESS": "1"}}


def read_report(report: Path, terminal: str) -> float:
    """Return the output tokens a second of a run, from its report or else from what it printed; ReportError."""
    if report.exists():
        try:
            return float(
                json.loads(report.read_text(encoding="utf-8"))["performance"]["system_output_throughput_tok_s"]
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{report} has no performance.system_output_throughput_tok_s: {error!r}") from None
    if found := OUTPUT_RATE.findall(terminal):
        return float(found[-1].replace(",", ""))
    raise ReportError(
        f"there is no {report}, and no 'Total Output Throughput' among {len(terminal)} characters printed"
    )


def run(case: Case, folder: Path, model: Path | None, repeat: int, timeout_s: float) -> dict[str, list[Any]]:
    """Run every variant in turn, `repeat` times over; rows have tokens_per_s alone. Raises ReportError."""
    prepare, bench = commands(case, folder, model)
    subprocess.run(prepare, check=True, timeout=timeout_s)
    rows: dict[str, list[Any]] = {variant: [] for variant in environments()}
    for _ in range(repeat):
        for variant, variables in environments().items():
            (folder / "report.json").unlink(missing_ok=True)
            line = [*bench[:1], *(part for name in variables for part in ("-x", name)), *bench[1:]]
            done = subprocess.run(
                line,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            if done.returncode:
                raise ReportError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
            rows[variant].append({"tokens_per_s": read_report(folder / "report.json", done.stdout)})
    return rows
