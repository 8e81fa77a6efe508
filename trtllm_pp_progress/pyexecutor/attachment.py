"""What one executor gets beside its own attributes: an engine, the verdict on it, and its drains."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trtllm_pp_progress.mpi.cores import crowded
from trtllm_pp_progress.mpi.facts import thread_multiple
from trtllm_pp_progress.progress.engine import Engine
from trtllm_pp_progress.progress.keeper import KEEPER
from trtllm_pp_progress.progress.log import Log
from trtllm_pp_progress.pyexecutor.drains import Drains
from trtllm_pp_progress.pyexecutor.ranges import annotate
from trtllm_pp_progress.pyexecutor.shape import ASYNC, QUEUE, TABLES, Action, Compatibility, examine
from trtllm_pp_progress.settings.core import Settings

__all__ = ["NAME", "Attachment", "Unattached", "Values", "attach", "attachment_of", "engine_of"]

logger = logging.getLogger("trtllm_pp_progress")

NAME = "_pp_progress"

_creating = threading.RLock()  # a garbage collection inside may end an executor, which comes back here


class Values:
    """What an executor's exchanged attributes are read from: here C code finds them without a call of Python's.

    What is not here is where a plain attribute would be, or missing: an executor may be older than the install.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = weakref.ref(executor)

    def __getattr__(self, name: str) -> Any:
        executor = self._executor()
        try:
            return vars(executor)[name]
        except KeyError:
            kind = type(executor).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=executor) from None


class Unattached:
    """Stands on the class for the attachment that an executor does not have."""

    def __get__(self, executor: Any, owner: type | None = None) -> Any:
        return self if executor is None else SimpleNamespace(values=Values(executor))


@dataclass(eq=False)
class Attachment:
    """One executor's engine, its class's verdict, and once its worker has started its own."""

    engine: Engine
    of_class: Compatibility
    values: Values
    drains: Drains | None = None
    _verdict: Compatibility | None = None

    def verdict(self, executor: Any) -> Compatibility:
        """Return the verdict on the executor: its class's until start_worker() is over, then its own, for good."""
        if self._verdict is None and QUEUE in vars(executor):
            self._verdict = examine(executor, self.of_class)
        return self._verdict or self.of_class

    def begin_life(self, executor: Any) -> Compatibility:
        """Judge an executor whose worker starts, say what differs from its class's verdict, and start its driver."""
        verdict = examine(executor, self.of_class)
        self.drains = self._verdict = None  # what start_worker() makes after this counts as well
        if verdict.reason != self.of_class.reason:
            # Upstream drops warnings of all ranks but the leader.
            level = logging.ERROR if verdict.action is Action.STAND_DOWN else logging.INFO
            logger.log(level, "this executor (era %s): %s, %s", verdict.era, verdict.action.value, verdict.reason)
        if verdict.may_drive:
            self.engine.driver.start(crowded())
        if (table := self.engine.tables.get(TABLES[0])) is not None:
            table.sends.urgent = verdict.may_drive and _samples_inline(executor)
        return verdict

    def start_keeper(self) -> None:
        """Have the keeper ready, which drives what a deadline abandons, where a thread of ours may enter MPI."""
        settings = self.engine.settings
        if thread_multiple():
            KEEPER.start(settings.mode, crowded(), settings.drain_deadline_s)

    def wait_before_forward(self, executor: Any, table: Any, slot: int, upstream_wait: Callable[[], Any]) -> None:
        """Wait for a slot as long as the executor has patience for its drains."""
        if self.drains is None:
            patience = self.engine.settings.drain_deadline_s if self.verdict(executor).drives else math.inf
            self.drains = Drains(self.engine, patience)
        self.drains.wait(table, slot, upstream_wait)

    def look_before_forward(self) -> None:
        """Test the sample states that are pending once: the executor thread has been in MPI since it sent them.

        From era G on the last rank drains none of them, and a native driver that is not told steps in for nothing.
        """
        if (table := self.engine.tables.get(TABLES[0])) is not None and (table.sends.fresh or table.sends.pending):
            for slot in table.sends.slots():
                self.engine.finish(table, slot, 1)
            self.engine.rest()


def attachment_of(executor: Any) -> Attachment | None:
    """Return what an executor got, or None if it has nothing yet."""
    attachment: Attachment | None = vars(executor).get(NAME)
    return attachment


def engine_of(executor: Any) -> Engine | None:
    """Return the engine of an executor, or None if it has none yet."""
    attachment = attachment_of(executor)
    return None if attachment is None else attachment.engine


def attach(
    executor: Any, settings: Settings, of_class: Compatibility, born: Callable[[Any], object] = lambda executor: None
) -> Attachment:
    """Return an executor's attachment, made at its first use; `born` is told of it then.

    When the executor is collected its pending sends go to the keeper: MPI may still read their buffers.
    """
    with _creating:
        if (attachment := attachment_of(executor)) is None:
            engine = Engine(settings, Log(_identity(executor)))
            annotate(engine)
            attachment = vars(executor)[NAME] = Attachment(engine, of_class, Values(executor))
            weakref.finalize(executor, engine.let_go, alone=True).atexit = False
            born(executor)
        return attachment


def _samples_inline(executor: Any) -> bool:
    """Whether the executor thread relays what it has sampled: the first rank waits for that, and nobody here does."""
    seen = vars(executor)
    rank, size = (getattr(seen.get("dist"), name, None) for name in ("pp_rank", "pp_size"))
    return seen.get(ASYNC) is False and isinstance(rank, int) and isinstance(size, int) and rank == size - 1


def _identity(executor: Any) -> Callable[[], tuple[Any, Any]]:
    known = weakref.ref(executor)
    last: tuple[Any, Any] = (None, None)

    def identify() -> tuple[Any, Any]:
        nonlocal last
        if (living := known()) is not None:
            dist = vars(living).get("dist")
            last = getattr(dist, "pp_rank", None), getattr(dist, "next_pp_rank", None)
        return last

    return identify
