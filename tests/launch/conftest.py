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
from jobs import KILLED, ROOT, on_ranks

import trtllm_pp_progress

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 80  # only a fault makes a job reach it
HUNG = "Timeout (0:"  # what the deadline of a shutdown prints, before the stacks
PATHS = [Path(trtllm_pp_progress.__file__).parents[1], ROOT / "tests" / "support"]


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
    environment = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))} | environment
    done = on_ranks(ranks, deadline, *arguments, cwd=cwd, **environment)
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
