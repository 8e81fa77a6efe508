"""One stage of a model: transformers' own layers, the caches of its requests, and nothing of the other stages."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from decoder.spec import ModelError, Spec, cut
from decoder.weights import fill, open_weights

__all__ = ["DTYPES", "Chunk", "StageModel", "family"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Chunk:
    """What one request adds in a step: `ids` at positions `start`, `start` + 1, ...; the prompt, or one token."""

    request_id: int
    ids: Sequence[int]
    start: int


def family(spec: Spec) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of a model and the classes of its family: DecoderLayer, RMSNorm, RotaryEmbedding."""
    name = spec.config["model_type"]
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    title = name.capitalize()
    config = getattr(configuration, f"{title}Config").from_dict(spec.config)
    config._attn_implementation = "sdpa"  # what the unsplit model takes by default
    return config, {part: getattr(modeling, title + part) for part in ("DecoderLayer", "RMSNorm", "RotaryEmbedding")}


class StageModel:
    """Stage `stage` of `stages`: rows of hidden state in, rows out; the first takes token ids, the last gives logits.

    Requests run one by one, so that the numbers are those of batch size 1, bit by bit. Rows of a batch come
    concatenated, and a chunk names its place, so that a batched forward (one pass, padded or packed) can replace
    `_forward` without a change outside. Not thread-safe: one thread at a time. Raises ModelError.
    """

    def __init__(self, spec: Spec, stage: int, stages: int, *, device: str = "cpu", dtype: str = "float32") -> None:
        if dtype not in DTYPES:
            raise ModelError(f"unknown dtype {dtype!r}: valid ones are {', '.join(DTYPES)}")
        self.spec, self.device, self.dtype = spec, device, DTYPES[dtype]
        self.first, self.last = stage == 0, stage == stages - 1
        self.hidden = int(spec.config["hidden_size"])
        indices = cut(spec, stages)[stage]
        weights = open_weights(spec)
        config, classes = family(spec)
        tied = bool(config.tie_word_embeddings)

        def make(module: Any, prefix: str) -> Any:
            fill(module, prefix, weights, device, self.dtype)
            return module.eval()

        with torch.device("meta"):  # shapes only: values come one tensor at a time, and only this stage's
            layers = [classes["DecoderLayer"](config, index) for index in indices]
            embed = torch.nn.Embedding(spec.vocabulary, self.hidden)
            norm = classes["RMSNorm"](self.hidden, eps=config.rms_norm_eps)
            head = torch.nn.Linear(self.hidden, spec.vocabulary, bias=False)
        self.layers = [make(layer, f"model.layers.{index}.") for index, layer in zip(indices, layers, strict=True)]
        for position, layer in enumerate(layers):
            layer.self_attn.layer_idx = position  # the caches hold this stage's layers only
        self.rotary = classes["RotaryEmbedding"](config).to(device)
        self.embed = make(embed, "model.embed_tokens.") if self.first else None
        self.norm = make(norm, "model.norm.") if self.last else None
        self.head = make(head, "model.embed_tokens." if tied else "lm_head.") if self.last else None
        self.caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Add the chunks to their requests and return the rows for the next stage, or one row of logits a chunk.

        `rows` is (sum of the chunks' lengths, hidden); None on the first stage. A chunk that does not begin where its
        request's cache ends is an error of the caller: ValueError.
        """
        outputs, offset = [], 0
        for chunk in chunks:
            if rows is None:
                ids = torch.tensor(chunk.ids, dtype=torch.long, device=self.device)
                hidden = self.embed(ids)  # type: ignore[misc]
            else:
                hidden = rows[offset : offset + len(chunk.ids)].to(self.device)
            offset += len(chunk.ids)
            outputs.append(self._forward(chunk, hidden[None])[0])
        return torch.cat(outputs)

    def _forward(self, chunk: Chunk, hidden: torch.Tensor) -> torch.Tensor:
        cache = self.caches.get(chunk.request_id)
        if cache is None:
            cache = self.caches[chunk.request_id] = DynamicCache()
        if cache.get_seq_length() != chunk.start:
            raise ValueError(
                f"request {chunk.request_id}: {cache.get_seq_length()} positions are cached, the next is {chunk.start}"
            )
        positions = torch.arange(chunk.start, chunk.start + len(chunk.ids), device=self.device)[None]
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:  # without a mask sdpa is causal over a prompt and full for one token: both right
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=rotation,
            )
        if self.norm is None or self.head is None:
            return hidden
        logits: torch.Tensor = self.head(self.norm(hidden)[:, -1:]).float()
        return logits

    def release(self, request_id: int) -> None:
        """Drop the cache of a request, if there is one."""
        self.caches.pop(request_id, None)
