"""Handle shapes: what a pending send looks like, and how to ask it, without blocking, whether it is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Probe", "UnknownShapeError", "complete_now", "probe"]

Test = Callable[[], bool]


class UnknownShapeError(TypeError):
    """A handle cannot be tested without blocking; it is left to upstream's own wait."""


class Probe:
    """Ask one handle, or every handle of a list, whether it is complete.

    `done()` never blocks. Handles that have answered yes are not asked again. `certain` is false where the answer may
    stay no until somebody calls wait() (torch.distributed on gloo: pytorch/pytorch#30723), so that polling must not be
    the only path.
    """

    __slots__ = ("_open", "certain")

    def __init__(self, tests: list[Test], certain: bool) -> None:
        self._open = tests
        self.certain = certain

    def done(self) -> bool:
        """Test what is still open, once each; raises what a handle raises, UnknownShapeError for a senseless answer."""
        self._open = [test for test in self._open if not test()]
        return not self._open


def probe(handle: Any) -> Probe:
    """Return the probe for a handle of a known shape, and raise UnknownShapeError for any other.

    Known: anything with `test()` (mpi4py's pkl5.Request, a tuple whose test() returns (flag, message), and
    MPI.Request), anything with `is_completed()` (torch's Work), and plain lists or tuples of these, which are complete
    when all are (pytorch/pytorch#132644). Not known: Ray's MultiHandleWrapper, which has only `wait()`.
    """
    if type(handle) in (list, tuple):  # exactly: pkl5.Request is a tuple too, and answers for itself
        parts = [probe(part) for part in handle]
        return Probe([part.done for part in parts], all(part.certain for part in parts))
    if tests := _member_tests(handle):
        return Probe(tests, certain=True)
    if callable(test := getattr(handle, "test", None)):
        return Probe([lambda: _flag(test())], certain=True)
    if callable(is_completed := getattr(handle, "is_completed", None)):
        return Probe([lambda: _flag(is_completed()) and _confirm(handle)], certain=False)
    raise UnknownShapeError(
        f"{type(handle).__module__}.{type(handle).__qualname__} has neither test() nor is_completed()"
    )


def complete_now(handle: Any) -> bool:
    """Test a handle once, as cheaply as can be; raises whatever a handle of another shape makes of it."""
    if isinstance(handle, tuple) and handle and hasattr(handle[0], "Test"):  # pkl5.Request: see _member_tests
        for part in handle:  # noqa: SIM110  # a generator costs as much as the test
            if part.Test() is not True:
                return False
        return True
    return handle.test()[0] is True


def _member_tests(handle: Any) -> list[Test]:
    # pkl5.Request is a tuple of MPI.Request. Its own test() is made for receives, whose message it unpickles, and takes
    # four times as long (3.8 against 1.0 us); a send is complete when its members are.
    if not isinstance(handle, tuple):
        return []
    tests = [getattr(part, "Test", None) for part in handle]
    return tests if all(map(callable, tests)) else []  # type: ignore[return-value]


def _flag(answer: Any) -> bool:
    # (False, None) is truthy, so the flag has to be taken out; a mock's answer is no answer.
    flag = answer[0] if isinstance(answer, tuple) and answer else answer
    if not isinstance(flag, int):
        raise UnknownShapeError(f"a test answered {answer!r} where a flag was expected")
    return bool(flag)


def _confirm(work: Any) -> bool:
    work.wait()  # returns at once, and raises where the send failed
    return True
