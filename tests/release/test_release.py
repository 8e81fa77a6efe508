"""ci/release.sh makes files that are fit to go out, and its checks would see those that are not."""

import os
import platform
import re
import shutil
import zipfile

import pytest
from places import ROOT
from releases import run

import trtllm_pp_progress

PYTHON = ROOT / ".venv" / "release" / "bin" / "python"
PROCESSORS = ("x86_64", "aarch64")
HERE = platform.machine()
CHANGELOG = "# Changelog\n\n## 1.2.0 - {}\n\n- Something.\n\n## 1.1.0 - 2026-01-01\n"

pytestmark = [
    pytest.mark.timeout(400),  # the first run fetches zig, and what an emulated Arm needs
    pytest.mark.skipif(HERE not in PROCESSORS, reason="no wheel is built for this processor"),
]


def checked(function, *arguments):
    """Return the problems that a function of ci/check_release.py finds."""
    code = f"import sys, pathlib, check_release as c; print(*c.{function}, sep='\\n', file=sys.stderr)"
    said = run(PYTHON, "-c", code, *arguments, cwd=ROOT / "ci")
    return [line for line in said.splitlines() if "runs on" not in line and "installed without" not in line and line]


def native(wheel):
    """Return the path of the native part in a wheel: the only library."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = [name for name in archive.namelist() if ".so" in name]
    return found


def changed(wheel, folder, without=(), extra=None):
    """Copy a wheel without some of its files and with others; return the copy."""
    extra = extra or {}
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(folder / wheel.name, "w") as new:
        for name in old.namelist():
            if name not in without and name not in extra:
                new.writestr(name, old.read(name))
        for name, content in extra.items():
            new.writestr(name, content)
    return folder / wheel.name


def test_a_release_is_an_sdist_and_a_wheel_for_each_processor(release):
    """Of any Python; a second build had the same bytes, and without a compiler the native part is there."""
    version = trtllm_pp_progress.__version__
    wheels = [f"trtllm_pp_progress-{version}-py3-none-manylinux_2_28_{processor}.whl" for processor in PROCESSORS]
    expected = sorted([f"trtllm_pp_progress-{version}.tar.gz", *wheels])
    assert sorted(path.name for path in release.folder.iterdir()) == expected
    assert f"_{HERE}.whl, installed without a compiler: native part built: True\n" in release.said
    assert [name for name in expected if not re.search(rf"^[0-9a-f]{{64}}  {name}$", release.said, re.M)] == []


@pytest.mark.skipif(HERE != "x86_64", reason="Arm is emulated on x86-64")
def test_the_arm_wheel_runs_on_arm(release):
    """On an emulated one; where Debian's emulator cannot be had, that is said, and is no fault of the release."""
    assert "on Arm, Python 3." in release.said or "not run on Arm: " in release.said
    assert "native part built: False" not in release.said


@pytest.mark.parametrize("processor", PROCESSORS)
def test_what_is_whole_has_no_problem(processor, release):
    """Control of the tests below."""
    wheel = release.wheel(processor)
    assert checked("content_problems(*map(pathlib.Path, sys.argv[1:]))", ROOT, wheel) == []
    assert checked("native_problems(pathlib.Path(sys.argv[1]))", wheel) == []


def test_a_file_too_few_or_too_many_is_seen(release, tmp_path):
    """Such as a wheel without its native part, or with its tests."""
    wheel = release.wheel(HERE)
    library = native(wheel)
    bad = changed(wheel, tmp_path, without=[library], extra={"tests/test_this.py": ""})
    assert checked("content_problems(*map(pathlib.Path, sys.argv[1:]))", ROOT, bad) == [
        f"{wheel.name} lacks {library}",
        f"{wheel.name} has tests/test_this.py, which nobody expects",
    ]


def test_a_library_for_another_processor_is_seen(release, tmp_path):
    """The other one's, under this one's name."""
    wheel, other = release.wheel("aarch64"), release.wheel("x86_64")
    with zipfile.ZipFile(other) as archive:
        library = archive.read(native(other))
    bad = changed(wheel, tmp_path, extra={native(wheel): library})
    (said,) = checked("native_problems(pathlib.Path(sys.argv[1]))", bad)
    assert "with a 'aarch64' architecture" in said


def test_a_symbol_of_a_later_glibc_is_seen(release, tmp_path):
    """As whoever compiles on the machine at hand would get it."""
    source, library = tmp_path / "new.c", tmp_path / "new.so"
    source.write_text("int pthread_create(); int f(void) { return pthread_create(); }\n")
    target = ["-target", "aarch64-linux-gnu.2.34", "-O2", "-shared", "-fPIC"]
    env = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(PYTHON.parents[1] / "zig")}
    run(PYTHON, "-m", "ziglang", "cc", *target, source, "-o", library, env=env)
    wheel = release.wheel("aarch64")
    bad = changed(wheel, tmp_path, extra={native(wheel): library.read_bytes()})
    assert "the native part needs GLIBC_2.34 of libc.so.6" in "\n".join(
        checked("native_problems(pathlib.Path(sys.argv[1]))", bad)
    )


def test_a_native_part_that_is_not_there_once_installed_is_seen(release, tmp_path):
    """The sdist where there is no compiler: it installs, and says what is missing."""
    (sdist,) = release.folder.glob("*.tar.gz")
    said = checked("install_problems(*map(pathlib.Path, sys.argv[1:]))", sdist, tmp_path / "venv")
    assert len(said) == 1
    assert "native_error 'the native driver was not built" in said[0]


@pytest.mark.parametrize(
    ("version", "date", "tag", "problems"),
    [
        ("1.2.0", "unreleased", "", []),
        ("1.2.0", "2026-11-30", "", []),
        ("1.2.0", "2026-11-30", "v1.2.0", []),
        ("1.2.0", "unreleased", "v1.2.0", ["CHANGELOG.md dates 1.2.0 'unreleased': a tagged release has a day"]),
        ("1.2.0", "soon", "", ["CHANGELOG.md dates 1.2.0 'soon': a day, or unreleased"]),
        ("1.2.0", "2026-11-30", "v1.2.1", ["the tag is v1.2.1, of version 1.2.0 it is v1.2.0"]),
        ("1.3.0", "2026-11-30", "", ["CHANGELOG.md begins with 1.2.0, the package is 1.3.0"]),
    ],
)
def test_version_changelog_and_tag_agree(version, date, tag, problems, release):
    """A release is tagged v and its version, and the changelog has the day."""
    assert checked("version_problems(*sys.argv[1:])", version, CHANGELOG.format(date), tag) == problems


def test_those_of_this_checkout_agree(release):
    """Whatever its tag is."""
    changelog, tag = (ROOT / "CHANGELOG.md").read_text(), run("git", "tag", "--points-at", "HEAD", "v*").strip()
    assert checked("version_problems(*sys.argv[1:])", trtllm_pp_progress.__version__, changelog, tag) == []


def test_a_release_with_a_problem_fails(release, tmp_path):
    """With exit code 1, and the problem on stderr: here, a wheel that is missing."""
    shutil.copytree(release.folder, tmp_path / "built")
    (tmp_path / "built" / release.wheel("aarch64").name).unlink()
    said = run(PYTHON, "ci/check_release.py", ROOT, tmp_path / "built", code=1)
    assert "not fit for release: built were" in said
