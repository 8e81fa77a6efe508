"""What the engine knows of the relay thread: which it is, and how to wake it."""

from __future__ import annotations

import threading

__all__ = ["RelayThread"]


class RelayThread:
    """The thread that drives while it waits for the next batch, once it has come by."""

    def __init__(self) -> None:
        self.thread: int | None = None  # its get_ident()
        self._asleep: threading.Condition | None = None
        self.out = False  # whether it has to keep out of MPI: the process is on its way out

    def comes_by(self) -> None:
        """Note that the calling thread is the relay's, and awake."""
        self.thread, self._asleep = threading.get_ident(), None

    def falls_asleep(self, condition: threading.Condition) -> None:
        """Note that the relay thread is about to wait for `condition`, whose lock it holds."""
        self._asleep = condition

    def wakes(self) -> None:
        """Note that it has come back."""
        self._asleep = None

    def is_current(self) -> bool:
        """Whether the calling thread is the relay's."""
        return threading.get_ident() == self.thread

    def wake(self) -> None:
        """Wake it if it sleeps."""
        if (condition := self._asleep) is not None:
            with condition:
                condition.notify()
