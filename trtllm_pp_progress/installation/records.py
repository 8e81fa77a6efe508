"""What is installed where, in this process."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from trtllm_pp_progress.patching.patch import Patch
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.pyexecutor.attachment import Values, attachment_of, engine_of
from trtllm_pp_progress.pyexecutor.shape import Compatibility
from trtllm_pp_progress.settings.core import Settings

__all__ = ["INSTALLED", "LOCK", "Record", "class_name", "engines"]


@dataclass(eq=False)
class Record:
    """One patched class."""

    compatibility: Compatibility
    patch: Patch
    settings: Settings
    executors: weakref.WeakSet[Any]

    def engines(self) -> list[Engine]:
        """Return the engines of its living executors."""
        return [engine for executor in list(self.executors) if (engine := engine_of(executor))]

    def forget_values(self) -> None:
        """Have a later install read the exchanged attributes anew: upstream may assign them until then."""
        for executor in list(self.executors):
            if (attachment := attachment_of(executor)) is not None:
                attachment.values = Values(executor)


LOCK = threading.RLock()  # of whoever installs or uninstalls; never held while a test may be stuck
INSTALLED: dict[type, Record] = {}


def engines() -> list[Engine]:
    """Return the engines of every living executor."""
    return [engine for record in list(INSTALLED.values()) for engine in record.engines()]


def class_name(cls: type) -> str:
    """Return a class's full name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _forked() -> None:
    # The executors are the parent's, whose threads may have held any lock of theirs: the child's exit waits for none.
    for record in INSTALLED.values():
        record.executors.clear()


os.register_at_fork(after_in_child=_forked)
