"""The package's face: what it exports, and what importing it does not import."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import trtllm_pp_progress as package

ROOT = Path(package.__file__).parents[1]
HEAVY = ("mpi4py", "torch", "numpy", "tensorrt_llm", "vllm", "click", "rich", "matplotlib", "transformers")


def imported(statement):
    """Run a statement in a clean interpreter and return the names of the modules it has imported."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_public_list_is_this_one():
    """A name is added to or taken from the public list on purpose only."""
    assert sorted(package.__all__) == [
        "IncompatibleError",
        "Installation",
        "PatchError",
        "Settings",
        "SettingsError",
        "install",
        "installed",
        "status",
        "uninstall",
    ]
    assert package.__version__.count(".") == 2


def test_every_exported_name_is_there_and_nothing_else_is_public():
    """What is not private and no submodule is in __all__."""
    public = {
        name for name, value in vars(package).items() if not name.startswith("_") and type(value) is not type(package)
    }
    assert public == set(package.__all__)


CORE = ("settings", "mpi", "door", "driver", "progress", "patching", "pyexecutor", "installation")
MODULES = sorted(
    f"{room}.{path.stem}"
    for room in CORE
    for path in (ROOT / package.__name__ / room).glob("*.py")
    if path.stem[0] != "_"
)


def test_the_core_s_modules_are_found():
    """Control: the list is of files, and not empty for a room that has moved."""
    assert {name.split(".")[0] for name in MODULES} == set(CORE)


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_own_list_names_what_it_has(name):
    """__all__ of each core module is without doubles, and each name exists."""
    module = import_module(f"{package.__name__}.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize(
    "statement",
    [
        "import trtllm_pp_progress",
        "import trtllm_pp_progress.auto",
        "import trtllm_pp_progress; trtllm_pp_progress.install()",
    ],
)
def test_importing_and_installing_imports_nothing_heavy(statement):
    """Neither MPI nor torch nor an engine nor the command line's libraries come along."""
    assert imported(statement).isdisjoint(HEAVY)


def test_the_command_line_imports_no_mpi():
    """--help and bad input work where MPI does not."""
    assert imported("import trtllm_pp_progress.cli, trtllm_pp_progress.tools.job.launch").isdisjoint(
        {"mpi4py", "torch", "numpy"}
    )


def test_the_check_would_see_an_import():
    """Control: a module that is imported is found."""
    assert "decimal" in imported("import trtllm_pp_progress, decimal")


def test_the_package_says_that_it_is_typed():
    """Type checkers read its hints."""
    assert (Path(package.__file__).parent / "py.typed").exists()
