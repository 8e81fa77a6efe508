"""Tests on several hosts; where this machine cannot make them, the tests are left out with the reason."""

import pytest
from beds import CANNOT, on_hosts


@pytest.fixture(scope="session")
def possible():
    """Skip where no bed can be made, with what ci/hosts.sh says."""
    made = on_hosts(1, "true")
    if made.returncode == CANNOT:
        pytest.skip(made.stdout.strip())
    assert made.returncode == 0, made.stdout


@pytest.fixture
def hosts(possible):
    """Return the function that runs a command on the first of some hosts."""
    return on_hosts
