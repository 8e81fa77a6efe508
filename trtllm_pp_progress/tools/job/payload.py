"""A payload that pickles as an array does: out-of-band where the protocol can, so that pkl5 sends it by itself."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

__all__ = ["OUT_OF_BAND", "Buffer"]

OUT_OF_BAND = 256 * 1024  # bytes from which pkl5 does


class Buffer(bytearray):
    """Bytes, which a pickle of protocol 5 need not copy."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Buffer, (PickleBuffer(self),)
