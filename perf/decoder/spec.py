"""Which model: names, shapes and limits, looked up without importing torch, so that a bad name costs no time."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CACHE", "SHAPES", "ModelError", "Spec", "cut", "resolve"]

CACHE = Path(__file__).resolve().parent.parent / "cache"
SMOLLM2 = "smollm2"
RANDOM = "qwen3-random"
FAMILIES = ("llama", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those without a state that requests would share

# Qwen3-0.6B as published, and two scaled shapes: `small` for a CPU, `tiny` for tests.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, vocab_size=512, max_position_embeddings=2048),
    "small": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=28, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=64, vocab_size=37_984, max_position_embeddings=40_960),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960),
}  # fmt: skip
COMMON = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


class ModelError(ValueError):
    """A model cannot be used; the message is one line and names the value and the valid ones."""


@dataclass(frozen=True)
class Spec:
    """A model that exists: its configuration, and where its weights are (`path` is None for random ones)."""

    name: str
    config: dict[str, Any]
    path: Path | None = None
    seed: int = 0

    @property
    def layers(self) -> int:
        """Number of decoder layers, which is the most stages it can be cut into."""
        return int(self.config["num_hidden_layers"])

    @property
    def vocabulary(self) -> int:
        """Number of token ids; a row of logits has as many float32."""
        return int(self.config["vocab_size"])

    @property
    def eos(self) -> frozenset[int]:
        """Token ids that end a text; empty for random weights."""
        ids = self.config.get("eos_token_id")
        return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def resolve(model: str, *, seed: int = 0, cache: Path = CACHE) -> Spec:
    """Look a model up by name: `smollm2`, `qwen3-random[:tiny|small|0.6b]`, or the path of a checkpoint directory.

    `smollm2` must have been converted (`prepare`). `seed` is that of random weights. Raises ModelError.
    """
    name, _, size = model.partition(":")
    if name == RANDOM:
        size = size or "0.6b"
        if size not in SHAPES:
            raise ModelError(f"unknown size {size!r} of {RANDOM}: valid ones are {', '.join(SHAPES)}")
        return Spec(f"{RANDOM}:{size}", {**COMMON, **SHAPES[size]}, seed=seed)
    if model == SMOLLM2:
        return _directory(SMOLLM2, cache / SMOLLM2)
    if model and Path(model).is_dir():
        return _directory(model, Path(model))
    raise ModelError(
        f"unknown model {model!r}: valid are {SMOLLM2}, {RANDOM}:SIZE ({', '.join(SHAPES)}) or a directory"
    )


def cut(spec: Spec, stages: int) -> list[range]:
    """Return the layers of each of `stages` stages: as even as possible, the longer ones first."""
    if not 1 <= stages <= spec.layers:
        raise ModelError(f"{spec.name} has {spec.layers} layers and cannot be cut into {stages} stages: "
                         f"valid are 1 to {spec.layers}")  # fmt: skip
    short, longer = divmod(spec.layers, stages)
    bounds = [stage * short + min(stage, longer) for stage in range(stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def _directory(name: str, path: Path) -> Spec:
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"model {name!r}: {path} has no config.json") from None
    except ValueError as error:
        raise ModelError(f"model {name!r}: {path / 'config.json'} is not JSON: {error}") from None
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model {name!r} is of type {family!r}: valid ones are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ModelError(f"model {name!r} is quantised: only plain weights are read")
    if config.get("use_sliding_window"):
        raise ModelError(f"model {name!r} uses sliding windows: only full attention is run")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"model {name!r} has rope type {rope_type!r}: valid ones are {', '.join(ROPE_TYPES)}")
    if not list(path.glob("*.safetensors")):
        raise ModelError(f"model {name!r}: {path} has no *.safetensors")
    return Spec(name, config, path.resolve())
