"""Prove the pipeline's tokens and measure its stages, without MPI: one process a stage.

    python perf decoder --model smollm2 --stages 4 --in-flight 4 --tokens 24

prints the time of each stage and of the unsplit model, and exits 1 if a token differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from decoder.convert import prepare
from decoder.processes import Pipeline
from decoder.spec import ModelError, cut

__all__ = ["PROMPTS", "main"]

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "Why is the sky blue? Answer briefly.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the pipeline with the unsplit model and print timings; 0 if equal, 1 if not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python perf decoder", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, qwen3-random:SIZE or a checkpoint directory")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=1, help="microbatches under way")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--payload", default="logits", help="none, logits, or a size in bytes")
    options = parser.parse_args(arguments)
    try:
        spec = prepare(options.model)
        cut(spec, options.stages)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from decoder.reference import generate, load
    from decoder.text import Text

    text = Text(spec)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    whole = load(spec, dtype=options.dtype)
    generate(whole, prompts[:1], 2)
    began = time.perf_counter()
    expected = generate(whole, prompts, options.tokens)
    unsplit_ms = 1e3 * (time.perf_counter() - began) / options.tokens / len(prompts)
    del whole
    with Pipeline(options.stages) as pipeline:
        pipeline.open(spec, dtype=options.dtype, payload=options.payload)
        pipeline.run(prompts[:1], 2)
        began = time.perf_counter()
        requests = pipeline.run(prompts, options.tokens, in_flight=options.in_flight)
        split_ms = 1e3 * (time.perf_counter() - began) / options.tokens / len(prompts)
        figures = pipeline.figures()
    for prompt, request in zip(PROMPTS, requests, strict=True):
        print(f"{prompt} -> {text.decode(request.tokens)}")
    print(f"unsplit {unsplit_ms:.1f} ms a token, {options.stages} stages {split_ms:.1f} ms a token")
    for rank, figure in enumerate(figures):
        print(f"stage {rank}: {figure['layers']} layers, {figure['step_ms']:.2f} ms, {figure['peak_mb']:.0f} MB peak")
    equal = expected == [request.tokens for request in requests]
    print(f"tokens {'equal' if equal else 'DIFFER'}, wrong payloads {pipeline.wrong}")
    return int(not equal or pipeline.wrong > 0)
