"""A child process that answers in lines of JSON, and is ended with all it has started when its time is up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MARK", "RANKS", "Answer", "ask", "tell"]

# What a launcher tells its ranks: the child is none. What configures MPI (OMPI_MCA_pml and the like) stays.
RANKS = re.compile(
    r"PMI_|PMIX_|PRTE_|HYD\w_|HYDRA_|MPI_LOCAL|OMPI_(COMM|UNIVERSE|APP|FILE|FIRST|ARGV|COMMAND|NUM)_"
    r"|OMPI_MCA_(ess|orte|prte|pmix)"
)
MARK = "trtllm-pp-progress-doctor "  # begins each line of an answer; libraries write to stdout as they like


@dataclass(frozen=True)
class Answer:
    """What a child said before it ended: "ok", "failed", "crashed" or "timed out"."""

    state: str
    said: dict[str, Any]
    stderr: str
    error: str | None


def tell(**said: Any) -> None:
    """Answer, in the child: a part of the answer at a time, so that a crash later on loses nothing."""
    print(MARK + json.dumps(said), flush=True)


def ask(module: str, timeout_s: float, environ: Mapping[str, str]) -> Answer:
    """Run `module`'s main() in a child of at most `timeout_s` seconds; never raises for what the child does.

    It is no rank of a job, where it would hang for the other ranks, or disturb them.
    """
    own = {name: value for name, value in environ.items() if not RANKS.match(name)}
    line = [sys.executable, "-c", f"from {module} import main; main()"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        # Files, not pipes: a daemon that the child has left behind would keep a pipe open.
        child = subprocess.Popen(
            line, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        err.seek(0)
        lines, stderr = out.read().splitlines(), err.read()
    said: dict[str, Any] = {}
    for text in lines:
        if text.startswith(MARK):
            said |= json.loads(text[len(MARK) :])
    return Answer(*_outcome(code, said, stderr, timeout_s))


def _outcome(code: int | None, said: dict[str, Any], stderr: str, timeout_s: float) -> tuple[str, Any, str, str | None]:
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    if code is None:
        return "timed out", said, stderr, f"no answer within {timeout_s:g} s"
    if code < 0:
        return "crashed", said, stderr, f"ended by {signal.Signals(-code).name}"
    if code > 0:
        return "failed", said, stderr, said.pop("error", None) or last or f"exit code {code}"
    return "ok", said, stderr, None
