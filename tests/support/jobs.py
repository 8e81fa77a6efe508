"""Jobs started from an ordinary test: on ranks by ci/mpi.sh, or a command of its own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLED = 124  # what ci/mpi.sh exits with where its deadline ended the job
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace", "check": False}


def no_rank(**variables):
    """Return this process's environment without what a launcher of its own may have left: a job in a job is refused."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | variables


def on_ranks(ranks, deadline, *arguments, cwd=ROOT, **variables):
    """Run `python ARGUMENTS` on that many ranks, for `deadline` seconds at most; stdout has all that was written."""
    line = ["bash", ROOT / "ci" / "mpi.sh", str(ranks), str(deadline), *map(str, arguments)]
    return _run(line, deadline + 60, cwd, {"PYTHON": sys.executable, **variables})


def alone(deadline, *arguments, **variables):
    """Run `python ARGUMENTS` as a command of its own, which may start ranks itself."""
    return _run([sys.executable, *map(str, arguments)], deadline, None, variables)


def _run(line, deadline, cwd, variables):
    # Launchers that start and end at the same time trip over each other's session folders: "The PMIx server's listener
    # thread failed to start".
    with tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as folder:
        env = no_rank(**{"TMPDIR": folder, **variables})
        return subprocess.run(line, cwd=cwd, env=env, timeout=deadline, **OUTPUT)
