"""Check a release before it goes out: that names agree, what is in each file, and that the native part runs.

Usage: check_release.py SOURCE BUILT [TAG]: the tree it was built from, the folder with its files, the commit's tag.
Run by ci/release.sh in .venv/release. Prints what it finds; exits with 1 if anything is wrong.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

NAME = "trtllm_pp_progress"
PROCESSORS = ("x86_64", "aarch64")
GLIBC = (2, 28)
BESIDE = {f"{NAME}.pth", f"_{NAME}_gate.py"}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


def said(*line: str | Path, **options: object) -> str:
    """Return what a command prints; raise CalledProcessError, with what it said, where it fails."""
    return subprocess.run(list(map(str, line)), check=True, text=True, stdout=subprocess.PIPE, **options).stdout  # type: ignore[call-overload,no-any-return]


def version_problems(version: str, changelog: str, tag: str) -> Iterator[str]:
    """Yield each way in which the package's version, the changelog's newest section and the tag (or "") disagree."""
    newest, date = re.findall(r"^## (\S+) - (.+)$", changelog, re.M)[0]
    if newest != version:
        yield f"CHANGELOG.md begins with {newest}, the package is {version}"
    if tag and tag != f"v{version}":
        yield f"the tag is {tag}, of version {version} it is v{version}"
    if not re.fullmatch(r"\d{4}-\d\d-\d\d" if tag else r"\d{4}-\d\d-\d\d|unreleased", date):
        yield f"CHANGELOG.md dates {newest} {date!r}: " + (
            "a tagged release has a day" if tag else "a day, or unreleased"
        )


def content_problems(source: Path, wheel: Path) -> Iterator[str]:
    """Yield each file that a wheel lacks, and each that nobody expects in it."""
    modules = {str(path.relative_to(source)) for path in (source / NAME).rglob("*.py")} | {f"{NAME}/py.typed"}
    about = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    native = {str(path.relative_to(source).with_suffix(".so")) for path in (source / NAME).rglob("*.c")}
    expected = modules | BESIDE | native | {f"{about}/{name}" for name in METADATA}
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    yield from (f"{wheel.name} lacks {name}" for name in sorted(expected - found))
    yield from (f"{wheel.name} has {name}, which nobody expects" for name in sorted(found - expected))


def native_problems(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel's native part: its processor, its symbols, what else it needs."""
    line = [Path(sys.executable).with_name("auditwheel"), "show", "--json", wheel]
    shown = subprocess.run(line, capture_output=True, text=True, check=False)
    if shown.returncode:
        yield f"{wheel.name}: {' '.join(shown.stderr.split())}"  # such as: nothing in it is for its processor
        return
    found = json.loads(shown.stdout)
    print(f"{wheel.name}: runs on {found['overall_tag']}, needs {found['versioned_symbols']}")
    if found["external_libs"]:
        yield f"{wheel.name}: the native part needs {found['external_libs']}"
    for library, symbols in found["versioned_symbols"].items():
        for symbol in symbols:
            needed = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", symbol)
            if not needed or tuple(map(int, needed.groups()[:2])) > GLIBC:
                yield f"{wheel.name}: the native part needs {symbol} of {library}"


def install_problems(wheel: Path, folder: Path) -> Iterator[str]:
    """Install a wheel where no compiler is on the path, and yield what keeps the native part from being there."""
    said(sys.executable, "-m", "venv", folder)
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    env["PATH"] = str(folder / "bin")
    python = folder / "bin" / "python"
    said(python, "-m", "pip", "install", "-qq", wheel, env=env)
    line = [python, "-m", NAME, "doctor", "--json", "--no-measure"]
    report = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True, check=False).stdout
    package = json.loads(report)["package"]
    print(f"{wheel.name}, installed without a compiler: native part built: {package['native']}")
    if not package["native"] or not package["gate"]:
        yield f"{wheel.name}, installed: native_error {package['native_error']!r}, gate {package['gate']}"


def problems(source: Path, built: Path, tag: str) -> Iterator[str]:
    """Yield everything that is wrong with a release."""
    version = re.findall(r'__version__ = "(.+)"', (source / NAME / "settings" / "version.py").read_text())[0]
    yield from version_problems(version, (source / "CHANGELOG.md").read_text(), tag)
    wheels = {
        processor: built / f"{NAME}-{version}-py3-none-manylinux_2_28_{processor}.whl" for processor in PROCESSORS
    }
    expected = sorted([f"{NAME}-{version}.tar.gz", *(wheel.name for wheel in wheels.values())])
    if expected != (found := sorted(path.name for path in built.iterdir())):
        yield f"built were {found}, expected {expected}"
        return
    said(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))
    for wheel in wheels.values():
        yield from content_problems(source, wheel)
        yield from native_problems(wheel)
    if platform.machine() in wheels:
        with tempfile.TemporaryDirectory() as folder:
            yield from install_problems(wheels[platform.machine()], Path(folder) / "venv")


def main(source: str, built: str, tag: str = "") -> int:
    """Print what is wrong; return the exit code."""
    found = list(problems(Path(source), Path(built), tag))
    for problem in found:
        print(f"not fit for release: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
