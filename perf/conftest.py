"""pytest's side of perf/test_perf.py: its one option, and which cases are run."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    """Take the command line of `python perf/test_perf.py` as one option."""
    parser.addoption("--perf", default="", metavar="ARGUMENTS", help="the options of python perf/test_perf.py")


def pytest_generate_tests(metafunc: Any) -> None:
    """One test a case: those whose ids stand in the node ids that were asked for, else the published one."""
    if "perf_case" in metafunc.fixturenames:
        from case.ids import PUBLISHED

        named = [found for argument in metafunc.config.args for found in re.findall(r"::test_perf\[(.*)\]$", argument)]
        cases = named or [PUBLISHED]
        metafunc.parametrize("perf_case", cases, ids=cases)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """A case has its own deadline, and a library's warning does not fail it."""
    for item in items:
        if "perf_case" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("default"))
            if config.pluginmanager.hasplugin("timeout"):
                item.add_marker(pytest.mark.timeout(0))


@pytest.fixture
def perf_arguments(request: Any) -> list[str]:
    """Return the options as a command line."""
    return shlex.split(request.config.getoption("--perf"))
