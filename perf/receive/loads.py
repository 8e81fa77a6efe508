"""Transformer-sized work for a GPU: what a stage's model step is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LOADS", "Load", "transformer"]


@dataclass(frozen=True)
class Load:
    """A transformer-sized step: bf16 layers of a gated MLP model, `tokens` at once."""

    name: str
    tokens: int
    layers: int
    hidden: int = 4096
    inner: int = 14336


LOADS = {
    "decode": Load("decode", 64, 32),
    "prefill": Load("prefill", 2048, 8),
    "tiny": Load("tiny", 4, 1, 32, 64),  # for a try on CPUs
}


def transformer(load: Load, device: str = "cuda") -> Callable[[], None]:
    """Return a function that runs one step of a load: on a GPU a graph's replay, on a CPU the layers themselves."""
    import torch

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

    layers = [
        (make(load.hidden, load.hidden * 3 // 2), make(load.hidden, load.hidden), make(load.hidden, 2 * load.inner),
         make(load.inner, load.hidden))
        for _ in range(load.layers)
    ]  # fmt: skip
    state = make(load.tokens, load.hidden)

    def model() -> None:
        x = state
        for qkv, out, up, down in layers:
            mixed = torch.nn.functional.rms_norm(x, (load.hidden,)) @ qkv
            x = x + mixed[:, : load.hidden] @ out
            gate, value = (torch.nn.functional.rms_norm(x, (load.hidden,)) @ up).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * value) @ down
        state.copy_(torch.nn.functional.rms_norm(x, (load.hidden,)))

    if device == "cpu":
        return model
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model()
    torch.cuda.current_stream().wait_stream(side)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model()
    torch.cuda.synchronize()

    def replay(needed: Any = (layers, state)) -> None:  # a graph does not keep what it reads and writes
        graph.replay()

    return replay
