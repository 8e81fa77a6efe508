"""A child process that answers in lines of JSON, and is ended with all it has started when its time is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

__all__ = ["MARK", "Answer", "ask", "tell"]

MARK = "trtllm-pp-progress-child "  # begins each line of an answer; libraries write to stdout as they like


@dataclass(frozen=True)
class Answer:
    """What a child said before it ended: "ok", "failed", "crashed" or "timed out"; `printed` is anybody's."""

    state: str
    said: dict[str, Any]
    printed: str
    error: str | None


def tell(**said: Any) -> None:
    """Answer, in the child: a part of the answer at a time, so that a crash later on loses nothing."""
    print(MARK + json.dumps(said), flush=True)


def ask(module: str, timeout_s: float, environ: Mapping[str, str]) -> Answer:
    """Run `module`'s main() in a child of at most `timeout_s` seconds; never raises for what the child does.

    `environ` is the whole environment of the child. One that starts MPI must be no rank of a job (see role.py): it
    would hang for the other ranks, or disturb them.
    """
    line = [sys.executable, "-c", f"from {module} import main; main()"]
    with _text_file() as out, _text_file() as err:
        # Files, not pipes: a daemon that the child has left behind would keep a pipe open.
        child = subprocess.Popen(
            line, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
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
    for printed in lines:
        if printed.startswith(MARK):
            said |= json.loads(printed[len(MARK) :])
    state, error = _outcome(code, said, stderr, timeout_s)
    return Answer(state, said, "\n".join([*(line for line in lines if not line.startswith(MARK)), stderr]), error)


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _outcome(code: int | None, said: dict[str, Any], stderr: str, timeout_s: float) -> tuple[str, str | None]:
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    if code is None:
        return "timed out", f"no answer within {timeout_s:g} s"
    if code < 0:
        return "crashed", f"ended by {signal.Signals(-code).name}"
    if code > 0:
        return "failed", said.pop("error", None) or last or f"exit code {code}"
    return "ok", None
