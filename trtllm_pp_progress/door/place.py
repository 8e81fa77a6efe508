"""Where doors are: one folder of the user's, a socket a process, named by pid and start time."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["DoorError", "doors", "folder", "make_folder", "name_of", "sweep"]

NAME = "trtllm-pp-progress"
SUFFIX = ".sock"


class DoorError(RuntimeError):
    """There can be no door, or none is answered; the message says why."""


def folder() -> Path:
    """Return the folder: in the user's runtime directory, or in the temporary one under a name with the user's id."""
    runtime = Path(f"/run/user/{os.getuid()}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / NAME
    return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"


def make_folder() -> Path:
    """Return the folder, made if need be, for this user alone; DoorError where it is somebody else's or a link."""
    path = folder()
    path.mkdir(mode=0o700, exist_ok=True)
    seen = os.lstat(path)
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        raise DoorError(f"{path} is not a folder of this user alone")
    return path


def name_of(pid: int) -> str | None:
    """Return the file name of a process's door, None for one that is gone: a pid is used again, a start is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{pid}-{fields[19]}{SUFFIX}"  # the start time, in clock ticks since boot: proc(5)


def doors(where: Path | None = None) -> dict[int, Path]:
    """Return the doors of living processes by pid."""
    where = folder() if where is None else where
    found = [(_pid(path), path) for path in where.glob(f"*{SUFFIX}")] if where.is_dir() else []
    return {pid: path for pid, path in sorted(found) if pid and name_of(pid) == path.name}


def sweep(where: Path) -> None:
    """Remove the doors of processes that are gone."""
    alive = set(doors(where).values())
    for path in where.glob(f"*{SUFFIX}"):
        if path not in alive:
            path.unlink(missing_ok=True)


def _pid(path: Path) -> int:
    head = path.name.partition("-")[0]
    return int(head) if head.isdigit() else 0
