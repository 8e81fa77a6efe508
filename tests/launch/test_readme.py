"""Every command in the README is one that works."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import standin
from beds import CANNOT, on_hosts

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line.strip() for line in re.findall(r"^ {4}(\S.*)$", TEXT, re.MULTILINE)]
HOSTS = [command for command in COMMANDS if "node1:" in command]
SRUNS = [command for command in COMMANDS if command.startswith("srun ")]
BENCHES = [command for command in COMMANDS if "trtllm-pp-progress bench" in command and command not in HOSTS + SRUNS]
PROBES = [command for command in COMMANDS if "trtllm-pp-progress probe" in command]
SCRIPTS = [command for command in COMMANDS if command.startswith("bash ")]
SERVES = [command for command in COMMANDS if "trtllm-serve" in command]
DOCTORS = [command for command in COMMANDS if "trtllm-pp-progress doctor" in command]
SHORT = ["--repeat", "1", "--steps", "10", "--policies", "flush,patched"]


def test_every_command_is_of_a_known_kind():
    """A new kind of command in the README needs a test here."""
    assert len(PYTHON_BLOCKS) == 1
    known = BENCHES + HOSTS + SRUNS + PROBES + SCRIPTS + SERVES + DOCTORS
    installs = [command.split("#")[0].strip() for command in COMMANDS if command not in known]
    assert installs == ["pip install .", "pip install dist/*_$(uname -m).whl"]
    assert len(SERVES) == 2
    assert len(DOCTORS) == 1
    assert len(BENCHES) == 2
    assert len(HOSTS) == len(SRUNS) == 1
    assert len(PROBES) == 1
    assert len(SCRIPTS) == 2


def test_the_page_is_one_page():
    """The README stays a page of at most 120 lines."""
    assert len(TEXT.splitlines()) <= 120


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_blocks_run(block):
    """A Python block runs in a clean interpreter where TensorRT-LLM is not installed."""
    line = [sys.executable, "-c", block]
    done = subprocess.run(line, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def shell(tmp_path, places):
    """Return the function that runs a command as an operator's shell would, upstream's program being a stand-in."""
    serve = tmp_path / "bin" / "trtllm-serve"
    serve.parent.mkdir()
    serve.write_text(f"#!{places.python}\nimport report\n")
    serve.chmod(0o755)
    env = standin.environment(standin.write(tmp_path / "upstream"), standin.TESTS)
    env["PATH"] = os.pathsep.join([str(serve.parent), str(places.python.parent), env["PATH"]])
    return lambda command, code: standin.run(["bash", "-c", command], env, code)


@pytest.mark.parametrize("command", SERVES)
def test_the_commands_that_turn_it_on_do(command, shell):
    """A process that imports the executor is patched, and says so in one line."""
    done = shell(command, 0)
    (found,) = standin.reports(done.stdout)
    assert (found["patched"], found["once"]) == (True, True)
    assert "installed on" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", DOCTORS)
def test_the_doctor_answers(command, shell):
    """Here the transport is affected, and nothing is turned on."""
    assert shell(command, 1).stdout.startswith("affected: ")


def run(command, options, folder):
    """Run a command as it stands, with options that make it short, as an operator who is not root would."""
    environ = {
        **os.environ,
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        # What an operator with enough cores, who is not root, does not need.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    line = [*shlex.split(command), *options]
    return subprocess.run(line, cwd=folder, env=environ, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("command", PROBES)
def test_probe_commands_run(command, tmp_path):
    """A probe command runs as it stands, made short, and has a verdict on every transport."""
    done = run(command, ["--sizes", "1000000"], tmp_path)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert len(re.findall(r"^(?:MOVES|PARKS):", done.stdout, re.MULTILINE)) == 3, done.stdout


@pytest.mark.parametrize("command", BENCHES)
def test_bench_commands_run(command, tmp_path):
    """A bench command runs as it stands, made short, and reports no wrong payload."""
    done = run(command, SHORT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"│ patched +│.*│ +0 │", done.stdout), done.stdout
    assert ("--json" in command) == (tmp_path / "result.json").exists()


@pytest.mark.parametrize("command", HOSTS)
def test_a_bench_on_two_hosts_runs(command):
    """As it stands, on hosts of these names, made short; two ranks on each."""
    done = on_hosts(2, *shlex.split(command), *SHORT, options=["--name", "node%"], limit=100)
    if done.returncode == CANNOT:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
    assert "ranks 0/1 on node1; 2/3 on node2" in " ".join(done.stdout.split())
    assert re.search(r"│ patched +│.*│ +0 │", done.stdout), done.stdout


SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do
    case $1 in
    -N) nodes=$2; shift ;;
    --ntasks-per-node=*) tasks=${1#*=} ;;
    --mpi=pmix) ;;
    *) exit 64 ;;
    esac
    shift
done
export SLURM_STEP_NUM_TASKS=$((nodes * tasks)) SLURM_NTASKS_PER_NODE=$tasks
exec mpirun -n "$SLURM_STEP_NUM_TASKS" bash -c '
    export SLURM_PROCID=$PMIX_RANK
    exec env $(compgen -e OMPI_COMM_WORLD | sed "s/^/-u /") "$@"' sh "$@"
"""


@pytest.mark.parametrize("command", SRUNS)
def test_a_bench_under_slurm_runs(command, tmp_path, monkeypatch):
    """As it stands, as the tasks of an srun that is a stand-in: PMIx's and Slurm's variables, none of mpirun's."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = run(f"{tmp_path}/{command}", SHORT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"│ patched +│.*│ +0 │", done.stdout), done.stdout


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_parse(command):
    """The two scripts exist and parse; one is what runs this test, the other takes minutes."""
    assert subprocess.run(["bash", "-n", ROOT / command.split()[1]], timeout=10, check=False).returncode == 0
