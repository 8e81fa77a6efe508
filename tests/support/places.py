"""Put the package where tests want it: built as a wheel, in virtual environments and in a plain folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "trtllm_pp_progress.pth")


@dataclass(frozen=True)
class Places:
    """Where the package was put: the source it came from, its wheel, a venv that has it, one that has not, a folder."""

    source: Path
    wheel: Path
    venv: Path
    bare: Path
    folder: Path

    @property
    def python(self) -> Path:
        """The Python of the venv that has the package, and so its .pth."""
        return self.venv / "bin" / "python"

    @property
    def bare_python(self) -> Path:
        """The Python of the venv that has only what the package needs."""
        return self.bare / "bin" / "python"


def make_places(work: Path) -> Places:
    """Build the wheel from a copy of the source, install it in a throw-away venv and into a plain folder of `work`."""
    found = Places(work / "source", work / "wheel", work / "venv", work / "bare", work / "folder")
    shutil.copytree(
        ROOT / "trtllm_pp_progress",
        found.source / "trtllm_pp_progress",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    for name in (*SHIPPED, "_trtllm_pp_progress_gate.py"):
        shutil.copy(ROOT / name, found.source)
    pip(sys.executable, "wheel", "--wheel-dir", found.wheel, found.source)
    for venv, python in ((found.venv, found.python), (found.bare, found.bare_python)):
        make_venv(venv)
        assert python.exists()
    (wheel,) = found.wheel.glob("*.whl")
    pip(found.python, "install", wheel)
    pip(found.python, "install", "--target", found.folder, wheel)
    return found


def make_venv(folder: Path) -> None:
    """Make a venv that finds this environment's packages, but not what their .pth files would do."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], timeout=100, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if "trtllm_pp_progress" not in found.name:  # this package may be installed here as a wheel
            (dependencies / found.name).symlink_to(found)
    (site / "tests_dependencies.pth").write_text(f"{dependencies}\n")


def pip(python: Path | str, command: str, *arguments: Path | str) -> None:
    """Run this environment's pip for the Python of another, without dependencies and with the setuptools of here."""
    line = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python, command]
    line += [] if command == "uninstall" else ["--no-deps", "--no-index", "--no-build-isolation"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*map(str, line), *map(str, arguments)], env=env, timeout=100, check=True, cwd="/")
