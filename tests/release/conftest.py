"""What the tests of this folder share: one release, whichever worker of xdist needs it first."""

import fcntl
import os

import pytest
from releases import Release, make_release


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """Return a release of the working tree."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    said = base / "release.log"
    with (base / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            said.write_text(make_release(base / "release").said)
    return Release(base / "release", said.read_text())
