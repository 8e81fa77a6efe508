"""One stage of Qwen3 with everything in its place beforehand: static caches and buffers, so that a GPU can replay it.

The same arithmetic runs eagerly on a CPU and from a CUDA graph on a GPU. Attention of a decode step reads the whole
cache, masked, so a step costs the same whatever the request's length: that of the longest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from decoder.spec import ModelError, Spec, cut
from decoder.weights import open_weights

__all__ = ["StaticModel", "generate"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHUNKS = 16  # pieces of the cache that attention sums separately: one piece would keep one multiprocessor busy


@dataclass
class _Layer:
    norm: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor  # (query heads + key heads, head size)
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor  # (slots, key heads, length, head size)
    values: torch.Tensor


class StaticModel:
    """Stage `stage` of `stages`: token ids or rows of hidden state in, rows or greedy tokens out.

    `slots` requests of at most `length` positions have a place in the caches. Not thread-safe. Raises ModelError.
    """

    def __init__(
        self, spec: Spec, stage: int, stages: int, *, slots: int, length: int, device: str, dtype: str
    ) -> None:
        if spec.config["model_type"] != "qwen3":
            raise ModelError(f"model {spec.name!r} is of type {spec.config['model_type']!r}: the perf case runs qwen3")
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        self.first, self.last = stage == 0, stage == stages - 1
        self.length = -(-length // (8 * CHUNKS)) * 8 * CHUNKS
        config = spec.config
        self.hidden, intermediate = int(config["hidden_size"]), int(config["intermediate_size"])
        self.heads, self.kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self.head_dim, self.eps = int(config.get("head_dim") or 128), float(config.get("rms_norm_eps", 1e-6))
        weights = open_weights(spec)

        def get(name: str, *shape: int) -> torch.Tensor:
            return weights.get(name, torch.Size(shape)).to(self.device, self.dtype)

        def layer(prefix: str) -> _Layer:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            qkv = [get(f"{attention}{n}_proj.weight", size, self.hidden) for n, size in zip("qkv", (q, kv, kv))]  # noqa: B905
            norms = [get(f"{attention}{name}_norm.weight", self.head_dim) for name in "qk"]
            return _Layer(
                norm=get(prefix + "input_layernorm.weight", self.hidden),
                qkv=torch.cat(qkv),
                qk_norm=torch.cat([norms[0].expand(self.heads, -1), norms[1].expand(self.kv_heads, -1)]),
                out=get(attention + "o_proj.weight", self.hidden, q),
                mlp_norm=get(prefix + "post_attention_layernorm.weight", self.hidden),
                gate_up=torch.cat([get(f"{mlp}{n}_proj.weight", intermediate, self.hidden) for n in ("gate", "up")]),
                down=get(mlp + "down_proj.weight", self.hidden, intermediate),
                keys=self._cache(slots),
                values=self._cache(slots),
            )

        self.layers = [layer(f"model.layers.{index}.") for index in cut(spec, stages)[stage]]
        table = "model.embed_tokens.weight"
        head = table if config.get("tie_word_embeddings", False) else "lm_head.weight"
        self.embed = get(table, spec.vocabulary, self.hidden) if self.first else None
        self.norm = get("model.norm.weight", self.hidden) if self.last else None
        self.head = get(head, spec.vocabulary, self.hidden) if self.last else None
        self.places = torch.arange(self.length, device=self.device)[None]
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        angles = torch.outer(torch.arange(self.length, dtype=torch.float32), 1 / _theta(spec) ** powers)
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(self.device, self.dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(self.device, self.dtype)

    def _cache(self, slots: int) -> torch.Tensor:
        return torch.zeros(slots, self.kv_heads, self.length, self.head_dim, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def prompt(self, slot: int, rows: torch.Tensor) -> torch.Tensor:
        """Run a whole prompt into a slot: ids (n,) or rows (n, hidden) in; rows, or one token (1,), out."""
        hidden = rows if self.embed is None else self.embed[rows]
        count = len(hidden)
        cos, sin = self.cos[:count, None], self.sin[:count, None]
        for layer in self.layers:
            qk, value = self._project(layer, hidden, cos, sin)
            query, key = qk[:, : self.heads], qk[:, self.heads :]
            layer.keys[slot, :, :count] = key.transpose(0, 1)
            layer.values[slot, :, :count] = value.transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (query, key, value)), is_causal=True, enable_gqa=True
            )
            hidden = self._rest(layer, hidden, attended[0].transpose(0, 1).reshape(count, -1))
        return hidden if self.head is None else self._sample(hidden[-1:])

    @torch.inference_mode()
    def step(self, slots: slice, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add one token to each of n slots, ids (n,) or rows (n, hidden), at `positions` (n,); rows or tokens (n,) out.

        The slots are neighbours, so that their caches need no copy.
        """
        hidden = rows if self.embed is None else self.embed[rows]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        unseen = self.places > positions[:, None]
        bias = torch.zeros(unseen.shape, device=self.device, dtype=self.dtype).masked_fill_(unseen, -math.inf)
        decode = _compiled_decode() if self.device.type == "cuda" else StaticModel._decode
        for layer in self.layers:
            hidden = decode(self, layer, hidden, layer.keys[slots], layer.values[slots], positions, cos, sin, bias)
        return hidden if self.head is None else self._sample(hidden)

    def _decode(
        self,
        layer: _Layer,
        hidden: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """Return the rows of a step after one layer; its caches, as far as these slots have them, gain a place each."""
        qk, value = self._project(layer, hidden, cos, sin)
        slots = torch.arange(len(keys), device=keys.device)
        keys[slots, :, positions] = qk[:, self.heads :]
        values[slots, :, positions] = value
        attended = self._attend(qk[:, : self.heads], keys, values, bias)
        return self._rest(layer, hidden, attended.reshape(len(hidden), -1))

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, turned, (n, heads + kv heads, head size), and values (n, kv heads, head size)."""
        normed = F.rms_norm(hidden, (self.hidden,), layer.norm, self.eps)
        qkv = F.linear(normed, layer.qkv).view(len(hidden), -1, self.head_dim)
        qk, value = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
        qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * layer.qk_norm
        return qk * cos + qk.roll(self.head_dim // 2, -1) * sin, value

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one query a request over its whole cache; the sum over places is taken in CHUNKS pieces."""
        count, kv, length, size = keys.shape
        grouped = query.reshape(count * kv, -1, size)
        scores = torch.bmm(grouped, keys.view(count * kv, length, size).transpose(1, 2)) * size**-0.5
        scores = scores.view(count, kv, -1, length) + bias[:, None, None]
        shares = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
        pieces = shares.view(count * kv, -1, CHUNKS, length // CHUNKS).transpose(1, 2)
        pieces = pieces.reshape(count * kv * CHUNKS, -1, length // CHUNKS)
        sums = torch.bmm(pieces, values.view(count * kv * CHUNKS, length // CHUNKS, size))
        return sums.view(count, kv, CHUNKS, -1, size).sum(2)

    def _rest(self, layer: _Layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = hidden + F.linear(attended, layer.out)
        gate, up = F.linear(F.rms_norm(hidden, (self.hidden,), layer.mlp_norm, self.eps), layer.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, layer.down)

    def _sample(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        assert self.norm is not None
        return F.linear(F.rms_norm(hidden, (self.hidden,), self.norm, self.eps), self.head).argmax(-1)


@functools.cache  # and not at import: a CPU does without, and torch takes seconds
def _compiled_decode() -> Any:
    """Return the fused form of a layer, as upstream's kernels are: launched one by one, small ones take most of a step.

    It is the class's, and is given views of the caches: one variant a batch size does for every model, layer and slot.
    """
    return torch.compile(StaticModel._decode, dynamic=False)


def _theta(spec: Spec) -> float:
    """Return the base of the rotary embedding, wherever this age of checkpoint has it; ModelError for another kind."""
    rope = spec.config.get("rope_parameters") or spec.config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"model {spec.name!r} has rope type {kind!r}: the perf case runs default")
    return float(rope.get("rope_theta", spec.config.get("rope_theta", 10_000.0)))


def generate(
    spec: Spec, prompts: Sequence[Sequence[int]], count: int, *, batch: int, length: int, device: str, dtype: str
) -> list[list[int]]:
    """Return `count` greedy tokens a prompt of the unsplit model, `batch` prompts at a time; one batch size throughout.

    For a GPU in bfloat16, where another batch size can round otherwise; on a CPU compare with transformers' own.
    """
    whole = StaticModel(spec, 0, 1, slots=batch, length=length, device=device, dtype=dtype)
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), batch):
        group = prompts[begin : begin + batch]
        tokens = torch.cat([whole.prompt(i, _ids(prompt, whole)) for i, prompt in enumerate(group)])
        columns = [tokens]
        positions = torch.tensor([len(prompt) for prompt in group], device=whole.device)
        for _ in range(count - 1):
            tokens = whole.step(slice(0, len(group)), positions, tokens)
            positions = positions + 1
            columns.append(tokens)
        answers += torch.stack(columns, dim=1).tolist()
    return answers


def _ids(prompt: Sequence[int], model: Any) -> torch.Tensor:
    return torch.tensor(list(prompt), dtype=torch.long, device=model.device)
