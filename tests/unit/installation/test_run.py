"""The launcher's environment is a pure function: the bootstrap once and first, the switch on unless it is set."""

import os

import pytest

from trtllm_pp_progress.installation.run import BOOTSTRAP, RunError, environment, execute
from trtllm_pp_progress.settings.core import switched_on
from trtllm_pp_progress.settings.schema import SettingsError

HERE = str(BOOTSTRAP)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, [HERE]),
        ("", [HERE]),
        (HERE, [HERE]),
        ("/a:/b", [HERE, "/a", "/b"]),
        (f"/a:{HERE}:/b:{HERE}", [HERE, "/a", "/b"]),
        ("/a::/b", [HERE, "/a", "", "/b"]),
    ],
)
def test_the_bootstrap_is_on_pythonpath_once_and_first(before, after):
    """Whatever was there stays in its order, the empty entry included, which is the current folder."""
    environ = {} if before is None else {"PYTHONPATH": before}
    assert environment(environ)["PYTHONPATH"].split(os.pathsep) == after
    assert environment(environment(environ)) == environment(environ)


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("", "1"), (" ", "1"), ("1", "1"), ("0", "0")])
def test_the_switch_is_on_unless_it_is_set(before, after):
    """What the operator said stands; everything else in the environment is passed on."""
    environ = {"A": "b"} if before is None else {"A": "b", "TRTLLM_PP_PROGRESS": before}
    assert environment(environ) == {"A": "b", "PYTHONPATH": HERE, "TRTLLM_PP_PROGRESS": after}


def test_the_bootstrap_is_one_file_without_logic():
    """It is on the path of every Python program that the command starts, so it holds nothing else to be imported."""
    assert [path.name for path in BOOTSTRAP.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]
    assert len((BOOTSTRAP / "sitecustomize.py").read_text().splitlines()) <= 20


def test_what_cannot_be_started_is_told_with_a_shells_exit_code():
    """And this process goes on."""
    with pytest.raises(RunError, match="'no-such-program' was not found") as refused:
        execute(["no-such-program"], {"PATH": "/nowhere"})
    assert refused.value.code == 127


@pytest.mark.parametrize(
    ("value", "on"),
    [
        (None, None),
        ("", None),
        (" ", None),
        ("1", True),
        (" 1 ", True),
        ("0", False),
        ("true", True),
        ("True", True),
        ("false", False),
        ("False", False),
    ],
)
def test_the_switch(value, on):
    """On, off, or not set; true and false are what a YAML file of overrides makes of 1 and 0."""
    assert switched_on({} if value is None else {"TRTLLM_PP_PROGRESS": value}) is on


@pytest.mark.parametrize("value", ["yes", "on", "2", "t", "01"])
def test_a_switch_of_another_value_is_refused(value):
    """It names itself and the valid ones."""
    with pytest.raises(SettingsError, match=f"^TRTLLM_PP_PROGRESS='{value}' is not valid: 1 or 0$"):
        switched_on({"TRTLLM_PP_PROGRESS": value})
