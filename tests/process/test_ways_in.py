"""Each way in, as an operator uses it: real interpreters, an installed wheel, and a stand-in for upstream on disk."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import standin
from places import make_venv, pip
from standin import TESTS, report, run

ON = {"TRTLLM_PP_PROGRESS": "1"}
GATE = "_trtllm_pp_progress_gate"
UNKNOWN = "class PyExecutor:\n    pass\n"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """Return a folder with the stand-in."""
    return standin.write(tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """Return a folder with a stand-in whose class has a shape that nobody knows."""
    return standin.write(tmp_path_factory.mktemp("unknown"), UNKNOWN)


@pytest.fixture
def env(upstream):
    """Return the environment in which the stand-in is found and nothing is turned on."""
    return standin.environment(upstream, TESTS)


@pytest.fixture
def folder_env(upstream, places):
    """Return the environment in which the package is found by PYTHONPATH, so that its .pth does nothing."""
    return standin.environment(places.folder, upstream, TESTS)


# In the program


@pytest.mark.parametrize(
    "code",
    [
        "import trtllm_pp_progress; trtllm_pp_progress.install()",
        f"import {standin.MODULE}, trtllm_pp_progress; trtllm_pp_progress.install()",
        "import trtllm_pp_progress.auto",
        f"import {standin.MODULE}, trtllm_pp_progress.auto",
        "import trtllm_pp_progress.auto, trtllm_pp_progress; trtllm_pp_progress.install()",
    ],
    ids=["install before", "install after", "auto before", "auto after", "both"],
)
def test_an_import_in_the_program_patches_once(code, folder_env, places):
    """Before or after upstream's module, by install() or by auto."""
    found, _ = report(folder_env, python=places.bare_python, code=code)
    assert (found["patched"], found["once"]) == (True, True)


def test_auto_says_what_it_did_in_one_line(folder_env, places):
    """On stderr, with the pid; a program that has set logging up gets it in its own way instead."""
    found, said = report(folder_env, python=places.bare_python, code="import trtllm_pp_progress.auto")
    assert said.startswith(f"trtllm-pp-progress, pid {found['pid']}: installed on ")
    assert said.count("\n") == 1
    code = "import logging; logging.basicConfig(format='mine %(message)s')\nimport trtllm_pp_progress.auto"
    _, said = report(folder_env, python=places.bare_python, code=code)
    assert said.startswith("mine installed on ")
    assert said.count("\n") == 1


def test_an_explicit_install_raises_where_auto_logs(unknown, places):
    """A class of unknown shape ends a program that asked for the patch, and not one that would have liked it."""
    env = standin.environment(places.folder, unknown, TESTS)
    code = f"import {standin.MODULE}, trtllm_pp_progress; trtllm_pp_progress.install()"
    assert "IncompatibleError" in run([places.bare_python, "-c", code], env, code=1).stderr
    found, said = report(env, python=places.bare_python, code="import trtllm_pp_progress.auto")
    assert not found["patched"]
    assert "not installed: " in said
    assert said.count("\n") == 1


def test_the_variable_turns_auto_off(folder_env, places):
    """TRTLLM_PP_PROGRESS=0 is for the operator who cannot change the program; it is said."""
    found, said = report(
        {**folder_env, "TRTLLM_PP_PROGRESS": "0"}, python=places.bare_python, code="import trtllm_pp_progress.auto"
    )
    assert not found["patched"]
    assert "not installed: TRTLLM_PP_PROGRESS is 0" in said


# The .pth


def test_the_pth_is_inert_unless_the_variable_is_set(env, places):
    """Nothing of the package is imported, and nothing is said; the gate alone waits."""
    for variables in ({}, *({"TRTLLM_PP_PROGRESS": off} for off in ("", "0", "false", "False"))):
        found, said = report({**env, **variables}, python=places.python)
        assert (found["patched"], found["ours"], said) == (False, [GATE], "")


def test_the_gate_imports_nothing(places):
    """It runs at the start of every Python of the environment, when not even `typing` is there yet."""
    code = f"import sys; sys.path.insert(0, {str(places.folder)!r}); old = set(sys.modules); import {GATE}"
    done = run([places.bare_python, "-I", "-S", "-c", f"{code}; print(*set(sys.modules) - old)"], standin.environment())
    assert done.stdout.split() == [GATE]


def test_the_pth_patches_where_the_variable_is_set(env, places):
    """Once, with one line on stderr; upstream's module knows where it came from."""
    found, said = report({**env, **ON}, python=places.python)
    assert (found["patched"], found["once"], found["spec"]) == (True, True, True)
    assert said.count("\n") == 1
    assert "installed on" in said


@pytest.mark.parametrize("value", ["1", "True", "true"])
@pytest.mark.parametrize("before", ["", "import tensorrt_llm._torch.pyexecutor\n"], ids=["first", "package imported"])
def test_case_84_the_variable_may_come_after_the_interpreter_has_started(before, value, env, places):
    """As in a pool's worker, where os.environ is written by the pool, or by upstream's worker_main.

    Overrides of a YAML file are written as str(value): NVIDIA/TensorRT-LLM#9104.
    """
    code = f"{before}import os; os.environ['TRTLLM_PP_PROGRESS'] = {value!r}"
    found, _ = report(env, python=places.python, code=code)
    assert (found["patched"], found["once"]) == (True, True)


def test_the_variable_may_be_taken_back_before_the_import(env, places):
    """The last moment decides."""
    found, said = report({**env, **ON}, python=places.python, code="import os; del os.environ['TRTLLM_PP_PROGRESS']")
    assert (found["patched"], said) == (False, "")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TRTLLM_PP_PROGRESS": "yes"}, "TRTLLM_PP_PROGRESS='yes' is not valid: 1 or 0"),
        (ON | {"TRTLLM_PP_PROGRESS_MAX_POLLS": "0"}, "TRTLLM_PP_PROGRESS_MAX_POLLS='0' is not valid"),
    ],
    ids=["switch", "setting"],
)
def test_a_bad_variable_is_one_line_and_serving_starts(variables, said, env, places):
    """The value and the valid ones are named; the class is upstream's."""
    found, stderr = report({**env, **variables}, python=places.python)
    assert not found["patched"]
    assert said in stderr
    assert stderr.count("\n") == 1


def test_an_unknown_shape_is_one_line_and_serving_starts(unknown, places):
    """By the .pth as by auto."""
    found, said = report(standin.environment(unknown, TESTS, **ON), python=places.python)
    assert not found["patched"]
    assert "not installed: " in said
    assert said.count("\n") == 1


def test_a_package_that_cannot_be_imported_is_one_line_and_serving_starts(env, places, tmp_path):
    """Such as one whose dependency is missing."""
    (tmp_path / "wrapt.py").write_text("raise ImportError('no wrapt here')")
    env = {**env, **ON, "PYTHONPATH": f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"}
    found, said = report(env, python=places.python)
    assert not found["patched"]
    assert "cannot be imported by" in said
    assert said.endswith("no wrapt here\n")
    assert said.count("\n") == 1


def test_every_import_order_meets_the_gate_once(env, places):
    """auto, install and the gate together still patch once; uninstall() calls the gate off."""
    for code, patched in [
        ("import trtllm_pp_progress.auto", True),
        ("import trtllm_pp_progress; trtllm_pp_progress.install()", True),
        ("import trtllm_pp_progress; trtllm_pp_progress.uninstall()", False),
        ("import trtllm_pp_progress as p; p.uninstall(); p.install()", True),
    ]:
        found, _ = report({**env, **ON}, python=places.python, code=code)
        assert (found["patched"], found["once"]) == (patched, True), code


# The launcher


def launch(places, env, *command, code=0, **options):
    """Run the launcher of the folder, with the Python that does not have the package."""
    return run([places.bare_python, "-m", "trtllm_pp_progress", "run", *command], env, code=code, **options)


def launched(places, env, *command, **options):
    """Return the reports of what the launcher ran."""
    return standin.reports(launch(places, env, "--", *command, **options).stdout)


def test_without_the_launcher_nothing_is_patched(folder_env, places):
    """Control: in a plain folder there is no .pth that would do it."""
    found, _ = report({**folder_env, **ON}, python=places.bare_python)
    assert (found["patched"], found["ours"]) == (False, [])


def test_the_launcher_patches_what_it_runs(folder_env, places, upstream):
    """It turns the variable on, too; the command's sys.path is what it is without."""
    plain, _ = report(folder_env, python=places.bare_python)
    (found,) = launched(places, folder_env, places.bare_python, "-c", "import report")
    assert (found["patched"], found["once"]) == (True, True)
    assert found["path"] == plain["path"]


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_launcher_leaves_a_variable_that_is_set(value, folder_env, places):
    """0 stays off."""
    (found,) = launched(places, {**folder_env, "TRTLLM_PP_PROGRESS": value}, places.bare_python, "-c", "import report")
    assert found["patched"] == (value == "1")


def test_a_child_of_a_child_is_patched_once(folder_env, places):
    """And a launcher in a launcher changes nothing: the bootstrap is on the path once."""
    again = [places.bare_python, "-m", "trtllm_pp_progress", "run", "--"]
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NESTED!r}], check=True)"
    done = launch(places, folder_env, "--", *again, places.bare_python, "-c", child)
    assert [(found["patched"], found["once"]) for found in standin.reports(done.stdout)] == [(True, True)] * 2
    assert json.loads(done.stdout.splitlines()[-1]) == 1


NESTED = """
import json, os, subprocess, sys
import report
subprocess.run([sys.executable, "-c", "import report"], check=True)
path = os.environ["PYTHONPATH"].split(os.pathsep)
print(json.dumps(sum(entry.endswith("bootstrap") for entry in path)))
"""


def test_the_command_has_the_launchers_pid(folder_env, places):
    """It is exec'd, so that what mpirun or a supervisor watches is the command itself."""
    line = [places.bare_python, "-m", "trtllm_pp_progress", "run", "--", places.bare_python, "-c", "import report"]
    with subprocess.Popen(
        line, env=folder_env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        output, _ = process.communicate(timeout=60)
    assert standin.reports(output)[0]["pid"] == process.pid


def test_the_users_own_sitecustomize_still_runs(folder_env, places, tmp_path):
    """The one that Python would have run; it sees a sys.path without the bootstrap."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.users = sum('bootstrap' in entry for entry in sys.path)\n"
        "assert __name__ == 'sitecustomize' and sys.modules[__name__].__file__ == __file__\n"
    )
    env = {**folder_env, "PYTHONPATH": f"{folder_env['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    (found,) = launched(places, env, places.bare_python, "-c", "import report")
    assert (found["patched"], found["user"]) == (True, 0)


def test_a_users_sitecustomize_that_fails_fails_as_without(folder_env, places, tmp_path):
    """Python says so and goes on; the patch is on."""
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('the user made a mistake')")
    env = {**folder_env, "PYTHONPATH": f"{folder_env['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    _, plain = report(env, python=places.bare_python)
    done = launch(places, env, "--", places.bare_python, "-c", "import report")
    assert "the user made a mistake" in plain
    assert done.stderr.startswith(plain)
    assert standin.reports(done.stdout)[0]["patched"]


def test_a_python_without_the_package_is_told_when_it_matters(env, places):
    """The launcher's command may be another Python: it starts in silence, and says so where upstream is imported."""
    bootstrap = places.folder / "trtllm_pp_progress" / "installation" / "bootstrap"
    env = {**env, "PYTHONPATH": f"{bootstrap}{os.pathsep}{env['PYTHONPATH']}"}
    assert run([places.bare_python, "-c", ""], {**env, **ON}).stderr == ""
    found, said = report({**env, **ON}, python=places.bare_python)
    assert not found["patched"]
    assert "cannot be imported by" in said


def test_the_launcher_and_the_pth_together_patch_once(env, places):
    """As wherever the package is properly installed; the command-line program does the same."""
    done = run([places.venv / "bin" / "trtllm-pp-progress", "run", places.python, "-c", NESTED], env)
    assert [(found["patched"], found["once"]) for found in standin.reports(done.stdout)] == [(True, True)] * 2


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ([], 2, "COMMAND"),
        (["--"], 2, "COMMAND"),
        (["--", "no-such-program", "x"], 127, "'no-such-program' was not found"),
        (["--", str(Path(__file__).parent)], 126, "cannot be run: Permission denied"),
        (["--", ""], 127, "'' was not found"),
    ],
)
def test_a_bad_command_is_one_line(command, code, said, folder_env, places):
    """With the exit code that a shell has for it."""
    done = launch(places, folder_env, *command, code=code)
    assert said in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("variable", ["TRTLLM_PP_PROGRESS", "TRTLLM_PP_PROGRESS_MAX_POLLS"])
def test_a_bad_variable_ends_the_launcher(variable, folder_env, places):
    """Said once, before a hundred ranks say it; nothing is run."""
    done = launch(places, {**folder_env, variable: "no"}, "--", "echo", "ran", code=2)
    assert f"{variable}='no' is not valid" in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_the_commands_exit_code_is_the_launchers(folder_env, places):
    """Options after the command are the command's."""
    launch(places, folder_env, "bash", "-c", "exit 7", code=7)
    show = "import sys; print(sys.argv[1:])"
    done = launch(places, folder_env, places.bare_python, "-c", show, "--help", "--", "-x")
    assert done.stdout == "['--help', '--', '-x']\n"


# Installing and uninstalling


def files(venv):
    """List what is in a venv, but for byte code."""
    return sorted(str(path.relative_to(venv)) for path in venv.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_uninstalling_leaves_nothing_behind(editable, env, places, tmp_path):
    """Each file that pip put there goes, the .pth too; Python starts in silence, and the class is upstream's."""
    make_venv(tmp_path / "venv")
    python, before = tmp_path / "venv" / "bin" / "python", files(tmp_path / "venv")
    what = ["--editable", places.source] if editable else [*places.wheel.glob("*.whl")]
    pip(python, "install", *what)
    assert "trtllm_pp_progress.pth" in {Path(name).name for name in files(tmp_path / "venv")}
    found, _ = report({**env, **ON}, python=python)
    assert (found["patched"], found["once"]) == (True, True)

    pip(python, "uninstall", "--yes", "trtllm-pp-progress")
    assert files(tmp_path / "venv") == before
    found, said = report({**env, **ON}, python=python)
    assert (found["patched"], found["ours"], said) == (False, [], "")


def test_the_wheel_has_the_files_that_the_ways_in_need(places):
    """At the top of the wheel the .pth and the gate, in the package the bootstrap, which holds one file alone."""
    (site,) = places.venv.glob("lib/python*/site-packages")
    assert (site / "trtllm_pp_progress.pth").read_text() == f"import {GATE}\n"
    assert (site / f"{GATE}.py").exists()
    bootstrap = site / "trtllm_pp_progress" / "installation" / "bootstrap"
    assert [path.name for path in bootstrap.iterdir() if path.name != "__pycache__"] == ["sitecustomize.py"]
