"""From text to token ids and back; a model with random weights has no words, and shows its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decoder.spec import Spec

__all__ = ["Text"]


class Text:
    """A model's tokenizer: chat prompts in, readable text out."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._tokenizer: Any = None
        if spec.path is not None and any(spec.path.glob("tokenizer*")):
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True)

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's ids, as the user's turn of a chat if the model has a template.

        Without a tokenizer: one id a byte of UTF-8, spread over the vocabulary.
        """
        if self._tokenizer is None:
            return [(byte * 7919 + place) % self._spec.vocabulary for place, byte in enumerate(prompt.encode())]
        if self._tokenizer.chat_template:
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            return list(self._tokenizer.encode(prompt, add_special_tokens=False))
        return list(self._tokenizer.encode(prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of generated tokens, up to the first that ends it."""
        end = next((place for place, token in enumerate(tokens) if token in self._spec.eos), len(tokens))
        if self._tokenizer is None:
            return " ".join(map(str, tokens[:end]))
        return str(self._tokenizer.decode(list(tokens[:end]), skip_special_tokens=True)).strip()
