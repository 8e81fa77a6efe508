"""What every test shares: the versions in the header, and the package as its users have it."""

from __future__ import annotations

import platform
import signal
from importlib.metadata import version

import pytest
from places import Places, make_places


def pytest_report_header() -> str:
    """Name the versions that decide how the package behaves."""
    return f"Python {platform.python_version()}, wrapt {version('wrapt')}, click {version('click')}"


def pytest_configure() -> None:
    """Hear what a job in the background, or under nohup, ignores; else children, which inherit it, cannot be ended."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Return where the package was put, once a session."""
    return make_places(tmp_path_factory.mktemp("places"))
