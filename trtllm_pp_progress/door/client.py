"""Knock at a door."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from trtllm_pp_progress.door.place import DoorError

__all__ = ["ask"]

TIMEOUT_S = 2.0
MOST_BYTES = 16 << 20  # of an answer


def ask(path: Path, timeout_s: float = TIMEOUT_S, **request: Any) -> dict[str, Any]:
    """Send a request to a door and return its answer; DoorError where there is none, or it is an error."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            said = b""
            while not said.endswith(b"\n") and len(said) < MOST_BYTES and (piece := client.recv(65536)):
                said += piece
        answer = json.loads(said)
    except (OSError, ValueError) as error:
        raise DoorError(f"{path.name} does not answer: {error}") from None
    if not isinstance(answer, dict) or "error" in answer:
        raise DoorError(f"{path.name}: {answer.get('error') if isinstance(answer, dict) else answer!r}")
    return answer
