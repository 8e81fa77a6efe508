"""What one rank notes while it runs: when it was inside MPI, and the life of every sample state it passed on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trtllm_pp_progress.tools.host import Dist, PPCommTag

__all__ = ["Notes", "RecordedDist"]

Span = tuple[float, float]


@dataclass
class Notes:
    """Monotonic seconds of one rank, by step: a step is a batch, numbered alike on all ranks.

    `posted` is when the relay called isend, `receiving` when its receive began, `received` when that was complete.
    `inside` are the spans, of any thread, in which MPI calls could make this rank's sends progress. `host` is the
    executor's work for a batch: from its schedule to its launch.
    """

    host: dict[int, Span] = field(default_factory=dict)
    posted: dict[int, float] = field(default_factory=dict)
    receiving: dict[int, float] = field(default_factory=dict)
    received: dict[int, float] = field(default_factory=dict)
    inside: list[Span] = field(default_factory=list)


class RecordedDist(Dist):
    """A Dist that keeps notes: two clock readings and an append for each MPI call, in every policy alike."""

    def __init__(self, comm: Any = None) -> None:
        super().__init__(comm)
        self.notes = Notes()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Note the time in the block as time inside MPI."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.notes.inside.append((begun, time.monotonic()))

    def isend_object(self, value: Any, dest: int, tag: int) -> Any:
        """Start sending; a sample state's post is noted. It is no time inside MPI: an isend drives nothing."""
        if tag == PPCommTag.SAMPLE_STATE:
            self.notes.posted[value[0].step] = time.monotonic()
        return super().isend_object(value, dest, tag)

    def recv_object(self, src: int, tag: int) -> Any:
        """Receive, which makes this rank's sends progress all the while."""
        begun = time.monotonic()
        value = super().recv_object(src, tag)
        ended = time.monotonic()
        self.notes.inside.append((begun, ended))
        if tag == PPCommTag.SAMPLE_STATE:
            self.notes.receiving[value[0].step], self.notes.received[value[0].step] = begun, ended
        return value

    def touch(self) -> None:
        """Enter MPI and leave at once."""
        with self.inside():
            super().touch()
