"""Unit tests start from nothing installed and a clean environment, and end with no fault seen by any fake handle."""

from __future__ import annotations

import os
import threading

import fakes
import pytest

from trtllm_pp_progress.door.server import DOOR
from trtllm_pp_progress.installation import install as _install
from trtllm_pp_progress.installation.records import INSTALLED
from trtllm_pp_progress.mpi import facts, lifecycle
from trtllm_pp_progress.progress.keeper import KEEPER


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
    assert [thread for thread in threading.enumerate() if thread.name == "pp-keeper"] == []


def _reset() -> None:
    try:
        _install.uninstall()
    finally:
        INSTALLED.clear()
        _install._refused.clear()
        KEEPER.stop()  # and join its thread
        KEEPER._clear()
        DOOR.close()
        DOOR._answers.clear()
        lifecycle._announced.clear()
        facts.ended = False


@pytest.fixture
def clock():
    """Return a clock that only pauses move."""
    return fakes.FakeClock()


@pytest.fixture
def kept(monkeypatch):
    """Return the list of what is given to the keeper, which does not get it."""
    given = []
    monkeypatch.setattr(KEEPER, "keep", given.append)
    return given
