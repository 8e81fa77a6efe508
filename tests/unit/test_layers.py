"""The layers: imports go down the list only, and only one module reads the environment."""

import ast
import sys
from pathlib import Path

import pytest

import trtllm_pp_progress

PACKAGE = Path(trtllm_pp_progress.__file__).parent
NAME = "trtllm_pp_progress"

# Each may import what is above it in this list. A folder is one layer.
ORDER = [
    "_settings",
    "_handles",
    "_table",
    "_messages",
    "_understudy",
    "_parked",
    "_standby",
    "_engine",
    "_idle",
    "_pump",
    "_drains",
    "_beside",
    "_patch",
    "_compat",
    "_mixin",
    "_install",
    "__init__",
    "auto",
    "_bootstrap",
    "_run",
    "vllm",
    "telemetry",
    "host",
    "bench",
    "doctor",
    "probe",
    "cli",
    "__main__",
]
STDLIB_ONLY = {
    "_settings",
    "_handles",
    "_table",
    "_messages",
    "_engine",
    "_idle",
    "_patch",
    "_compat",
    "_mixin",
    "_pump",
    "_drains",
}
READS_ENVIRONMENT = {  # and why these may, besides _settings.py
    "_run.py": "passes the environment on to the command",
    "cli.py": "asks whether a launcher has started it",
    "doctor/_collect.py": "reports the variables that matter",
    "probe/_start.py": "asks whether a launcher has started it, and as which rank",
    "bench/_launch.py": "passes the environment on to the ranks",
    "bench/_report.py": "reports the variables that change what is measured",
}


def files():
    """Return every module of the package."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "native" not in path.parts)


def layer(path):
    """Return the layer a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(tree):
    """List the modules imported anywhere in a file, also inside functions, with the names taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
            assert node.level == 0, "relative import"


def own_layers(tree):
    """List the layers of this package that a file imports."""
    for module, name in imports(tree):
        parts = module.split(".")
        if parts[0] == NAME:
            below = parts[1] if len(parts) > 1 else name
            yield below if below in ORDER else "__init__"


def violations(where, tree):
    """List the layers that a file of layer `where` imports although they are not below it."""
    position = ORDER.index(where)
    return [found for found in own_layers(tree) if found != where and ORDER.index(found) >= position]


def reads_environment(tree):
    """Whether a file touches os.environ or os.getenv, however it was imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            return True
    return False


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    """No module imports its own layer's users, not even inside a function; a new module is placed in the list first."""
    assert layer(path) in ORDER
    assert violations(layer(path), ast.parse(path.read_text())) == []


@pytest.mark.parametrize("name", sorted(STDLIB_ONLY))
def test_the_core_needs_the_standard_library_alone(name):
    """The engine and what is around it import nothing from outside."""
    foreign = {module.split(".")[0] for module, _ in imports(ast.parse((PACKAGE / f"{name}.py").read_text()))}
    assert foreign <= set(sys.stdlib_module_names) | {NAME}


def test_the_host_knows_nothing_of_the_patch():
    """It is the peer to measure against: no module of it imports anything of ours but itself."""
    for path in (PACKAGE / "host").glob("*.py"):
        assert set(own_layers(ast.parse(path.read_text()))) <= {"host"}


def test_nothing_of_the_core_imports_an_adapter():
    """The receive policy for vLLM is an addition that the core does not know."""
    for path in files():
        if layer(path) != "vllm":
            assert "vllm" not in own_layers(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_settings_read_the_environment(path):
    """Everything else gets its settings handed, but for what is listed here with its reason."""
    relative = path.relative_to(PACKAGE).as_posix()
    assert reads_environment(ast.parse(path.read_text())) == (
        relative == "_settings.py" or relative in READS_ENVIRONMENT
    )


def test_the_engine_reads_in_one_sitting():
    """The engine module stays under 250 lines."""
    assert len((PACKAGE / "_engine.py").read_text().splitlines()) < 250


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("_engine", "from trtllm_pp_progress._mixin import grafts"),
        ("_engine", "def later():\n    import trtllm_pp_progress._install"),
        ("_settings", "from trtllm_pp_progress import install"),
        ("host", "from trtllm_pp_progress import bench"),
    ],
)
def test_an_import_that_goes_up_would_be_seen(where, source):
    """Control: upward imports in each form are found."""
    assert violations(where, ast.parse(source))


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_a_read_of_the_environment_would_be_seen(source):
    """Control: each way to read it is found."""
    assert reads_environment(ast.parse(source))
