"""Which engine runs a case here, and what a rank of the host engines builds."""

from __future__ import annotations

import random
from dataclasses import dataclass

from case import trtllm
from case.ids import Case, CaseError

__all__ = ["ENGINES", "Machine", "choose", "look", "prompts"]

ENGINES = ("trtllm", "host-gpu", "host-cpu")


@dataclass(frozen=True)
class Machine:
    """What was found: the number of GPUs torch can use, and whether TensorRT-LLM is installed."""

    gpus: int
    trtllm: bool


def look() -> Machine:
    """Look at this machine."""
    try:
        import torch

        gpus = torch.cuda.device_count()
    except ImportError:
        gpus = 0
    return Machine(gpus, trtllm.installed())


def choose(engine: str, case: Case, machine: Machine) -> str:
    """Return the engine asked for, or for `auto` the best one present; CaseError names what is missing."""
    found = f"tensorrt_llm is {'' if machine.trtllm else 'not '}installed, {machine.gpus} of {case.gpus} GPUs are here"
    problems = {
        "trtllm": None if machine.trtllm and machine.gpus >= case.gpus else found,
        "host-gpu": None if machine.gpus else "torch finds no GPU",
        "host-cpu": None,
    }
    if engine == "auto":
        return next(name for name in ENGINES if problems[name] is None)
    if engine not in ENGINES:
        raise CaseError(f"unknown engine {engine!r}: valid ones are auto, {', '.join(ENGINES)}")
    if problems[engine] is not None:
        raise CaseError(f"engine {engine!r} cannot run here: {problems[engine]}")
    return engine


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return that many prompts of random ids, the same everywhere."""
    generators = [random.Random(seed) for seed in range(count)]
    return [[generator.randrange(vocabulary) for _ in range(length)] for generator in generators]
