"""README's install lines, run as they stand in a fresh virtual environment, from a checkout and from a wheel."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest
from places import ROOT
from releases import run

README = (ROOT / "README.md").read_text()
LINES = re.findall(r"^ {4}(pip install .+)$", README, re.M)
INDEX = re.compile(r"install [\"']?trtllm-pp-progress")
NAME = "trtllm_pp_progress"

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def checkout(release, tmp_path_factory):
    """Return a checkout, as somebody has it who has run ci/release.sh in it."""
    folder = tmp_path_factory.mktemp("checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in names.stdout.split("\0")[:-1]:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(release.folder, folder / "dist")
    return folder


def test_the_readme_says_how_to_install():
    """From a checkout, and from a wheel."""
    assert [line for line in LINES if ".whl" not in line and not INDEX.match(line)]
    assert [line for line in LINES if ".whl" in line]


def test_the_index_is_named_only_once_something_was_published():
    """What the changelog calls unreleased is on no index, and no page or message advises to get it there."""
    (newest,) = re.findall(r"^## \S+ - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[:1]
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("perf/**/*.md"), *(ROOT / NAME).rglob("*.py")]
    assert len(files) > 50
    assert newest != "unreleased" or [path for path in files if INDEX.search(path.read_text())] == []


@pytest.mark.parametrize("line", [line for line in LINES if not INDEX.match(line)])
def test_an_install_line_installs(line, checkout, tmp_path):
    """The native part and the .pth are there, and the command is."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{env['PATH']}"
    run("bash", "-c", line, cwd=checkout, env=env)
    command = ["trtllm-pp-progress", "doctor", "--json", "--no-measure"]
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=120, check=False)
    package = json.loads(done.stdout)["package"]
    assert (package["native"], package["native_error"], package["gate"]) == (True, None, True), platform.machine()
