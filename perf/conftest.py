"""pytest's side of perf/test_perf.py: its options and its cases."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

NAMES = ("engine", "model", "scale", "requests", "output", "policies", "repeat", "link", "host-work-ms", "payload")
NAMES += ("compare", "transport", "check", "good", "timeout", "json")


def pytest_addoption(parser: Any) -> None:
    """Take the command's options as pytest's, named --perf-..."""
    group = parser.getgroup("perf case")
    group.addoption("--perf-case", action="append", default=[], help="a case id; may be repeated")
    for name in NAMES:
        group.addoption(f"--perf-{name}", help=f"--{name} of perf/test_perf.py")


def pytest_generate_tests(metafunc: Any) -> None:
    """One test a case: those of --perf-case or of the node ids that were asked for, else the published one."""
    if "perf_case" in metafunc.fixturenames:
        from perf_case.case import PUBLISHED

        named = [found for argument in metafunc.config.args for found in re.findall(r"::test_perf\[(.*)\]$", argument)]
        cases = metafunc.config.getoption("--perf-case") or named or [PUBLISHED]
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
    """Return the command line that says the same."""
    given = {name: request.config.getoption(f"--perf-{name}") for name in NAMES}
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", value)]
