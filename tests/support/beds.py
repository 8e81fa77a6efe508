"""Jobs on a bed of hosts, made by ci/hosts.sh and ended by a deadline."""

import os
import subprocess
import sys
from pathlib import Path

from jobs import OUTPUT, ROOT, no_rank

CANNOT = 77  # what ci/hosts.sh exits with where the machine lacks something
LIMIT_S = 60  # only a fault makes a job reach it
NOT_ROOT = (
    "unshare",
    "--user",
    "--map-user=65534",
    "--map-group=65534",
)  # no capability is left, but our files stay ours


def line(number, *command, options=(), limit=LIMIT_S, before=()):
    """Return the command line of a job on that many hosts; `before` runs ci/hosts.sh."""
    bed = ["bash", ROOT / "ci" / "hosts.sh", number, *options, "--", *command]
    return [str(part) for part in ("timeout", "--kill-after=5", limit, *before, *bed)]


def environment(**variables):
    """Return a job's variables: what is beside this Python, its launcher too, is found first."""
    return no_rank(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables)


def on_hosts(number, *command, options=(), limit=LIMIT_S, before=(), **variables):
    """Run a command on the first of that many hosts; stdout has all that was written."""
    return subprocess.run(
        line(number, *command, options=options, limit=limit, before=before),
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        timeout=limit + 30,
        **OUTPUT,
    )
