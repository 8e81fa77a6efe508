"""The handle table: a list that knows which of its slots hold a pending send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trtllm_pp_progress.progress.handles import pkl5_complete
from trtllm_pp_progress.progress.keeper import KEEPER, Kept
from trtllm_pp_progress.progress.sends import Sends

__all__ = ["HandleTable", "clear_slot"]


class HandleTable(list[Any]):
    """Upstream's list of send handles, one per microbatch slot, which reports what is written to it.

    It stays a list: indexing, tests for None and loops mean what they meant. A pkl5 request is tested once as it is
    written, before anybody else can see it: most sends of an executor thread are small and complete at once, and leave
    nothing to do but to count them. Where a native driver tests, the next writes after one in vain have none.
    `posted(table, slot, handle, error)` is called after any other handle was written; `error` is what that test raised.
    """

    def __init__(
        self, name: str, handles: Iterable[Any], posted: Callable[[HandleTable, int, Any, Exception | None], None]
    ) -> None:
        super().__init__(handles)
        self.sends = Sends(name)
        self._posted = posted
        self._report(0)

    def __setitem__(self, index: Any, value: Any) -> None:
        # Upstream's critical path, in the middle of a step: with cold caches each Python call more takes 4 us there.
        if isinstance(index, slice):
            self._set_slice(index, value)
            return
        sends, error, interrupted = self.sends, None, None
        if sends.untested:
            sends.untested -= 1
        elif isinstance(value, tuple) and not (sends.slow or sends.off or sends.urgent):
            try:
                if pkl5_complete(value):
                    list.__setitem__(self, index, None)
                    sends.at_once += 1
                    if sends.left or sends.pending:
                        self._overwritten(index, value)
                    return
                sends.in_vain()
            except AttributeError:
                pass  # another shape
            except Exception as raised:
                error = raised
            except BaseException as raised:  # whatever ends this thread: the buffers are in use
                interrupted = raised
        list.__setitem__(self, index, value)
        if sends.left or sends.pending:
            self._overwritten(index, value)
        if value is not None:
            self._posted(self, index if index >= 0 else index + len(self), value, error)
        if interrupted is not None:
            raise interrupted

    def let_all_go(self) -> None:
        """Give everything that may be in flight to the keeper, and clear its slots; the caller holds the lock."""
        sends = self.sends
        sends.look_at_fresh(lambda sends, slot, handle, error: sends.left.update({slot: handle}))
        for record in sends.records(None):
            sends.pending.pop(record.slot, None)
            sends.let_go(record)
            if self[record.slot] is record.handle:
                clear_slot(self, record.slot)
        for handle in sends.left.values():
            KEEPER.keep(Kept(handle, None))

    # Upstream of today only assigns to slots. What adds slots is reported too: upstream may use a list as a list, and a
    # send that nobody noted would stay parked.

    def append(self, value: Any) -> None:
        """Add a slot with a handle."""
        super().append(value)
        self._report(len(self) - 1)

    def extend(self, values: Iterable[Any]) -> None:
        """Add slots with handles."""
        before = len(self)
        super().extend(values)
        self._report(before)

    def __iadd__(self, values: Iterable[Any]) -> HandleTable:  # type: ignore[misc]
        self.extend(values)
        return self

    def _report(self, first: int) -> None:
        for slot in range(first, len(self)):
            if self[slot] is not None:
                self._posted(self, slot, self[slot], None)

    def _set_slice(self, index: slice, value: Any) -> None:
        slots, values = range(*index.indices(len(self))), list(value)
        if len(slots) != len(values):
            raise ValueError(f"{len(values)} handles for {len(slots)} slots: a handle table keeps its length")
        for slot, handle in zip(slots, values, strict=True):
            self[slot] = handle

    def _overwritten(self, index: int, value: Any) -> None:
        slot = range(len(self))[index]
        self.sends.left.pop(slot, None)
        if value is None:
            self.sends.pending.pop(slot, None)  # upstream has waited
        else:
            self.sends.displace(slot)


def clear_slot(handles: Any, slot: int) -> None:
    """Empty a slot, of a handle table without the bookkeeping of an assignment."""
    list.__setitem__(handles, slot, None)
