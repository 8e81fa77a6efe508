"""The door itself: a thread that sleeps until somebody knocks, and answers one request a connection.

No code, no pickle: a line of JSON in, a line of JSON out. Input is bounded, a client that hangs is dropped, other users
are refused. While it answers it holds no lock of anybody's.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trtllm_pp_progress.door.place import DoorError, make_folder, name_of, sweep

__all__ = ["DOOR", "Door"]

MOST_BYTES = 4096  # of a request
PATIENCE_S = 1.0  # with a client
SCHEMA = 1

Answer = Callable[[dict[str, Any]], Any]


class Door:
    """The door of this process: each patch adds what it has to say, by name, and the first one opens it.

    Gone at exit; a forked child has none.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._opening = threading.Lock()
        self._listener: socket.socket | None = None
        self.path: Path | None = None
        os.register_at_fork(after_in_child=self._forked)

    def add(self, name: str, answer: Answer) -> None:
        """Let `answer(request)` say, in plain values, what there is under `name`; opens the door if it is not open.

        Raises DoorError where it cannot be opened; OSError likewise.
        """
        with self._opening:
            self._answers[name] = answer
            if self._listener is None:
                self._open()

    def close(self) -> None:
        """Take the door away; harmless where there is none."""
        listener, self._listener = self._listener, None
        if listener is not None and self.path is not None:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()

    def _open(self) -> None:
        where, name = make_folder(), name_of(os.getpid())
        if name is None:
            raise DoorError("/proc says nothing of this process")
        sweep(where)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = where / name
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            os.chmod(path, 0o600)
            listener.listen(8)
        except OSError:
            listener.close()
            raise
        self._listener, self.path = listener, path
        atexit.register(self.close)
        threading.Thread(target=self._serve, args=(listener,), name="pp-door", daemon=True).start()

    def _forked(self) -> None:
        if self._listener is not None:
            self._listener.close()  # the file is the parent's
        self._listener, self.path, self._opening = None, None, threading.Lock()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return  # closed
                time.sleep(PATIENCE_S)  # no descriptor is left, as a rule
                continue
            with client, suppress(OSError):
                self._attend(client)

    def _attend(self, client: socket.socket) -> None:
        uid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid not in (os.getuid(), 0):
            said = _written({"error": f"user {uid} may not ask here"})
        else:
            said = self._answer(_line(client))
        client.settimeout(PATIENCE_S)
        client.sendall(said)

    def _answer(self, line: bytes) -> bytes:
        try:
            if len(line) > MOST_BYTES:
                raise ValueError(f"a request has at most {MOST_BYTES} bytes")
            request = json.loads(line)
            if not isinstance(request, dict):
                raise ValueError(f"{type(request).__name__} where an object is expected")
            return _written({name: answer(request) for name, answer in list(self._answers.items())})
        except Exception as error:  # whoever knocks gets the reason, and the process goes on
            return _written({"error": f"{type(error).__name__}: {error}"})


def _written(said: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, "pid": os.getpid(), **said}).encode() + b"\n"


def _line(client: socket.socket) -> bytes:
    """Return what a client says up to the end of its line within PATIENCE_S; more than MOST_BYTES is cut off."""
    ends, said = time.monotonic() + PATIENCE_S, b""
    while b"\n" not in said and len(said) <= MOST_BYTES:
        client.settimeout(max(0.001, ends - time.monotonic()))
        piece = client.recv(MOST_BYTES)
        if not piece:
            break
        said += piece
    return said


DOOR = Door()
