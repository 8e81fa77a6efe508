"""Weights by name: read from safetensors, or made from a seed; a stage asks only for those it holds."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from decoder.spec import ModelError, Spec

__all__ = ["Weights", "fill", "open_weights"]


class Weights(Protocol):
    """A source of tensors under transformers' names."""

    def get(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return one tensor on the CPU; ModelError if it is missing or has another shape."""


class CheckpointWeights:
    """Tensors of a checkpoint directory, one file or several with an index; the files are mapped, not read whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(file.name for file in path.glob("*.safetensors"))
        self._files = {name: file for file in files for name in self._names(file)}

    def _names(self, file: str) -> list[str]:
        try:
            with safe_open(self._path / file, framework="pt") as tensors:
                return list(tensors.keys())
        except Exception as error:  # safetensors raises its own type, and OSError
            raise ModelError(f"{self._path / file} cannot be read: {error}") from None

    def get(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name not in self._files:
            raise ModelError(f"{self._path} has no tensor {name!r}")
        with safe_open(self._path / self._files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        if tensor.shape != shape:
            raise ModelError(f"tensor {name!r} of {self._path} is {tuple(tensor.shape)}, not {tuple(shape)}")
        return tensor


class RandomWeights:
    """Normal values, each tensor from its own seed: a stage makes the same ones as the whole model does.

    Matrices keep the size of what passes through them and embeddings are small beside that, so that a token depends on
    its whole context; with the usual 0.02 throughout, tied embeddings would repeat the last token for ever.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def get(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        scale = 0.02 if "embed_tokens" in name else 1 / math.sqrt(shape[-1])
        return torch.empty(shape).normal_(0, scale, generator=generator)


def open_weights(spec: Spec) -> Weights:
    """Return the source of a model's weights."""
    return RandomWeights(spec.seed) if spec.path is None else CheckpointWeights(spec.path)


def fill(module: torch.nn.Module, prefix: str, weights: Weights, device: str, dtype: torch.dtype) -> None:
    """Give every parameter of a module made on the meta device its tensor, named `prefix` + its own name."""
    tensors = {
        name: weights.get(prefix + name, parameter.shape).to(device, dtype)
        for name, parameter in module.named_parameters()
    }
    module.load_state_dict(tensors, assign=True, strict=False)  # a tied name is no parameter of its own
    module.requires_grad_(False)
