"""Doors of these tests are in a folder of their own."""

import pytest

from trtllm_pp_progress.door import place
from trtllm_pp_progress.door.server import Door


@pytest.fixture(autouse=True)
def where(monkeypatch, tmp_path):
    """Return the folder of doors."""
    folder = tmp_path / "doors"
    monkeypatch.setattr(place, "folder", lambda: folder)
    return folder


@pytest.fixture
def door():
    """Return a door that answers what it was asked."""
    one = Door()
    one.add("echo", lambda request: request)
    yield one
    one.close()
