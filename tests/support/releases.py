"""Make a release of this working tree, as ci/release.sh does."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from places import ROOT


@dataclass(frozen=True)
class Release:
    """What ci/release.sh has made: its files, and what it said."""

    folder: Path
    said: str

    def wheel(self, processor: str) -> Path:
        """Return the wheel of a processor."""
        (found,) = self.folder.glob(f"*_{processor}.whl")
        return found


def run(*line: str | Path, code: int = 0, **options: object) -> str:
    """Run a command to its end, which must be `code`, in the checkout; return what it said on both streams."""
    options = {"cwd": ROOT, "timeout": 300, "stdin": subprocess.DEVNULL, **options}
    text = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([str(part) for part in line], check=False, **text, **options)
    assert done.returncode == code, f"{line} exited with {done.returncode}\n{done.stdout}"
    return done.stdout


def make_release(folder: Path) -> Release:
    """Release what the working tree holds, but for files that git does not know."""
    commit = run("git", "stash", "create").strip() or "HEAD"
    return Release(folder, run("bash", "ci/release.sh", folder, commit))
