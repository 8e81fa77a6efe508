"""What every test shares: the versions in the header, and the fakes within reach."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

sys.path[:0] = [path for path in [str(Path(__file__).parent)] if path not in sys.path]


def pytest_report_header() -> str:
    """Name the versions that decide how the package behaves."""
    return f"Python {platform.python_version()}, wrapt {version('wrapt')}, click {version('click')}"
