"""The same model in one piece, run by transformers' own generate: what the pipeline's tokens must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from decoder.convert import prepare
from decoder.layers import DTYPES, family
from decoder.spec import Spec
from decoder.weights import fill, open_weights

__all__ = ["generate", "load"]

hf: Any = transformers  # partly untyped


def load(model: str | Spec, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """Return the unsplit model: a checkpoint is loaded by transformers, random weights are those of the stages."""
    spec = model if isinstance(model, Spec) else prepare(model)
    hf.utils.logging.disable_progress_bar()
    if spec.path is not None:
        loaded = hf.AutoModelForCausalLM.from_pretrained(spec.path, dtype=DTYPES[dtype], local_files_only=True)
        return loaded.to(device).eval()
    config, classes = family(spec)
    with torch.device("meta"):
        whole = hf.AutoModelForCausalLM.from_config(config)
    whole.model.rotary_emb = classes["RotaryEmbedding"](config)  # its table is no weight: meta would leave it empty
    whole.tie_weights()
    fill(whole, "", open_weights(spec), device, DTYPES[dtype])
    whole.tie_weights()
    return whole.to(device).eval()


@torch.inference_mode()
def generate(
    model: str | Spec | Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int = 1,
) -> list[list[int]]:
    """Return `max_tokens` greedy tokens for each prompt, one prompt at a time; ends of text are not heeded.

    `model` is a name, a Spec, or what `load` returned. Sets torch's number of threads.
    """
    torch.set_num_threads(threads)
    whole = load(model, dtype=dtype, device=device) if isinstance(model, (str, Spec)) else model
    whole.generation_config = hf.GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], dtype=torch.long, device=device)
        output = whole.generate(ids, attention_mask=torch.ones_like(ids))
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers
