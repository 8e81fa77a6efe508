"""The automatic ways in: install, then open the door, and let serving start whatever becomes of either."""

import logging
import sys
from types import ModuleType

import pytest
from fakes import executor_class

import trtllm_pp_progress as package
from trtllm_pp_progress.door.client import ask
from trtllm_pp_progress.door.place import DoorError, doors
from trtllm_pp_progress.door.server import DOOR
from trtllm_pp_progress.installation import install as _install
from trtllm_pp_progress.installation.automatic import begin


@pytest.fixture
def upstream(monkeypatch):
    """Put upstream's module in place, with a class that can be patched."""
    module = ModuleType(_install.MODULE)
    module.PyExecutor = executor_class("E2")
    monkeypatch.setitem(sys.modules, _install.MODULE, module)
    return module


@pytest.fixture(autouse=True)
def _place(monkeypatch, tmp_path):
    """Keep doors out of the user's own folder."""
    monkeypatch.setattr("trtllm_pp_progress.door.place.folder", lambda: tmp_path / "doors")


def test_it_installs_and_opens_the_door(upstream):
    """Which tells the status of this process."""
    begin()
    assert package.installed()
    told = ask(DOOR.path)["tensorrt_llm"]
    assert [entry["era"] for entry in told["installed"]] == ["E2"]
    assert list(doors().values()) == [DOOR.path]


def test_what_waits_for_the_import_has_a_door_too():
    """The import comes later."""
    begin()
    assert ask(DOOR.path)["tensorrt_llm"]["waiting"] == _install.MODULE


def test_the_door_may_be_kept_closed(upstream, monkeypatch):
    """TRTLLM_PP_PROGRESS_DOOR=0."""
    monkeypatch.setenv("TRTLLM_PP_PROGRESS_DOOR", "0")
    begin()
    assert (package.installed(), doors()) == (True, {})


def test_without_an_install_there_is_no_door(upstream, monkeypatch):
    """There is nothing to tell."""
    monkeypatch.setenv("TRTLLM_PP_PROGRESS", "0")
    begin()
    assert (package.installed(), doors()) == (False, {})


@pytest.mark.parametrize("error", [DoorError("not a folder of this user"), OSError("no space"), RuntimeError("odd")])
def test_a_door_that_cannot_be_opened_is_one_line(error, upstream, monkeypatch, caplog):
    """Installed all the same."""

    def add(name, answer):
        raise error

    monkeypatch.setattr(DOOR, "add", add)
    begin()
    assert package.installed()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no door" in warnings[0]
    assert str(error) in warnings[0]
