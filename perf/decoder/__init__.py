"""A real decoder cut into pipeline stages, for the host executor: Qwen3 and Llama families, real or random weights.

    spec = decoder.prepare("smollm2")                   # once, before the ranks start
    rendezvous = decoder.Rendezvous()                   # on rank 0, kept until all have closed
    stage = decoder.build(spec, rank, size, address)    # on every rank; address = rendezvous.address, broadcast
    tokens = decoder.generate(spec, prompts, 24)        # the unsplit model, to compare with

`prepare`, `resolve` and `cut` find bad input without importing torch; the others import it when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from decoder.convert import prepare
from decoder.spec import CACHE, SHAPES, ModelError, Spec, cut, resolve

__all__ = [
    "CACHE",
    "SHAPES",
    "DecoderStage",
    "ModelError",
    "Rendezvous",
    "Spec",
    "StageModel",
    "Text",
    "WireError",
    "build",
    "cut",
    "generate",
    "load",
    "prepare",
    "resolve",
]

HEAVY = {
    "DecoderStage": "stages",
    "StageModel": "layers",
    "build": "stages",
    "Rendezvous": "wire",
    "WireError": "wire",
    "Text": "text",
    "generate": "reference",
    "load": "reference",
}


def __getattr__(name: str) -> Any:
    if name not in HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HEAVY[name]}"), name)
