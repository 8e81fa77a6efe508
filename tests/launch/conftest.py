"""Jobs on several ranks, started from an ordinary test by ci/mpi.sh and ended by their deadline."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import trtllm_pp_progress

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 80  # only a fault makes a job reach it
KILLED = 124  # what ci/mpi.sh exits with where its deadline ended the job
HUNG = "Timeout (0:"  # what the deadline of a shutdown prints, before the stacks
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
PATHS = [Path(trtllm_pp_progress.__file__).parents[1], ROOT / "tests", ROOT / "tests" / "mpi"]


@dataclass
class Job:
    """What a job left: its exit code, all that its ranks wrote, and when it was over (seconds since the epoch)."""

    rc: int
    output: str
    ended: float

    @property
    def killed(self):
        """Whether the deadline of the whole job ended it."""
        return self.rc == KILLED

    @property
    def hung(self):
        """Whether the deadline of a shutdown ended it."""
        return self.rc not in (0, KILLED) and HUNG in self.output

    def closed(self):
        """Return, by rank, the seconds its shutdown took and how many sends it gave up."""
        found = re.findall(r"^rank (\d+): closed in ([\d.]+) s, (\d+) abandoned$", self.output, re.M)
        return {int(rank): (float(seconds), int(abandoned)) for rank, seconds, abandoned in found}

    def leaving(self):
        """Return the seconds from the last rank's last line to the end of the job: MPI_Finalize, mostly."""
        return self.ended - max(map(float, re.findall(r"^rank \d+: leaves at ([\d.]+)$", self.output, re.M)))


def open_mpi():
    """Tell whether the MPI that jobs will use is Open MPI."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    launcher = shutil.which("mpirun", path=path) or "mpirun"
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return "Open MPI" in said


@pytest.fixture
def only_open_mpi():
    """Skip a test of what was seen on Open MPI only; its reason is in the test."""
    if not open_mpi():
        pytest.skip("only Open MPI was seen to do this")


def start(ranks, deadline, *arguments, cwd=ROOT, **environment):
    """Run `python ARGUMENTS` on that many ranks, for `deadline` seconds at most."""
    # Not what a launcher of this process may have left: a job in a job is refused.
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    own |= {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    own |= environment
    done = subprocess.run(
        ["bash", ROOT / "ci" / "mpi.sh", str(ranks), str(deadline), *map(str, arguments)],
        cwd=cwd,
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=deadline + 60,
        check=False,
    )
    return Job(done.returncode, done.stdout, time.time())


@pytest.fixture
def job():
    """Return the function that runs `python ARGUMENTS` on ranks."""
    return start


@pytest.fixture
def script():
    """Return the function that runs one of the scripts on ranks, each shutdown in `shutdown` seconds at most."""

    def run(ranks, name, *arguments, shutdown=40, **environment):
        environment["SHUTDOWN_LIMIT_S"] = str(shutdown)
        return start(ranks, LIMIT_S, SCRIPTS / f"{name}.py", *arguments, **environment)

    return run
