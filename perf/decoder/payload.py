"""What the last stage adds to its tokens: a small header with a checksum, then logits, or bytes up to a size."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

__all__ = ["LOGITS", "NONE", "pack", "parse", "wrong"]

NONE = "none"
LOGITS = "logits"
HEADER = struct.Struct("<4sIII")  # kind, requests, step, crc32 of tokens and body
KINDS = {NONE: b"none", LOGITS: b"logt", "bytes": b"byte"}


def parse(payload: str | int) -> str | int:
    """Return a valid payload: `none`, `logits`, or the size of the whole in bytes; ValueError names those."""
    if payload in (NONE, LOGITS):
        return payload
    try:
        size = int(payload)
    except ValueError:
        size = -1
    if size < HEADER.size:
        raise ValueError(f"unknown payload {payload!r}: valid are none, logits, or a size in bytes from {HEADER.size}")
    return size


def pack(payload: str | int, tokens: Sequence[int], logits: np.ndarray, step: int) -> bytes:
    """Return the payload of one sampled batch; `logits` is float32 (requests, vocabulary).

    `none` is the header alone, 16 bytes; a size is filled with bytes that depend on the tokens and the step.
    """
    kind, body = KINDS[NONE], b""
    if payload == LOGITS:
        kind, body = KINDS[LOGITS], np.ascontiguousarray(logits, dtype="<f4").tobytes()
    elif payload != NONE:
        size = int(payload) - HEADER.size
        pattern = _tokens(tokens) + struct.pack("<Q", step)
        kind, body = KINDS["bytes"], (pattern * (size // len(pattern) + 1))[:size]
    return HEADER.pack(kind, len(tokens), step, _crc(tokens, body)) + body


def wrong(data: bytes, tokens: Sequence[int], step: int) -> int:
    """Return 1 if a payload does not belong to these tokens and this step, or its logits to its tokens, else 0."""
    if len(data) < HEADER.size:
        return 1
    kind, requests, packed_step, crc = HEADER.unpack_from(data)
    body = memoryview(data)[HEADER.size :]
    if requests != len(tokens) or packed_step != step or crc != _crc(tokens, body):
        return 1
    if kind != KINDS[LOGITS] or not tokens:
        return 0
    logits = np.frombuffer(body, dtype="<f4").reshape(len(tokens), -1)
    sampled = logits[np.arange(len(tokens)), list(tokens)]
    return int(not np.array_equal(sampled, logits.max(axis=1)))  # the maximum, whichever of equal ones was taken


def _tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i8").tobytes()


def _crc(tokens: Sequence[int], body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(_tokens(tokens)))
