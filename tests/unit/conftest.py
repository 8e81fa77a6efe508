"""Unit tests start from nothing installed and a clean environment, and end with no fault seen by any fake handle."""

from __future__ import annotations

import os

import fakes
import pytest

from trtllm_pp_progress import _install, _table


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Reset what the package keeps for the life of a process, before and after; fail where a fake saw a fault."""
    for variable in [name for name in os.environ if name.startswith("TRTLLM_PP_PROGRESS")]:
        monkeypatch.delenv(variable)
    _reset()
    yield
    _reset()
    faults, fakes.FAULTS[:] = list(fakes.FAULTS), []
    assert faults == []


def _reset() -> None:
    _install.uninstall()
    _install._refused.clear()
    _install._hooked = False
    _table.ABANDONED.clear()


@pytest.fixture
def clock():
    """Return a clock that only pauses move."""
    return fakes.FakeClock()
