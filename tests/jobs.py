"""Jobs started from an ordinary test: on ranks by ci/mpi.sh, or a command of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KILLED = 124  # what ci/mpi.sh exits with where its deadline ended the job
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace", "check": False}


def no_rank(**variables):
    """Return this process's environment without what a launcher of its own may have left: a job in a job is refused."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | variables


def on_ranks(ranks, deadline, *arguments, cwd=ROOT, **variables):
    """Run `python ARGUMENTS` on that many ranks, for `deadline` seconds at most; stdout has all that was written."""
    line = ["bash", ROOT / "ci" / "mpi.sh", str(ranks), str(deadline), *map(str, arguments)]
    return subprocess.run(
        line, cwd=cwd, env=no_rank(PYTHON=sys.executable, **variables), timeout=deadline + 60, **OUTPUT
    )


def alone(deadline, *arguments, **variables):
    """Run `python ARGUMENTS` as a command of its own, which may start ranks itself."""
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, env=no_rank(**variables), timeout=deadline, **OUTPUT)
