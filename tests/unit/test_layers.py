"""The rooms: imports go down only, private names stay in their room, one definition each, sizes that can be read."""

import ast
import sys
from pathlib import Path

import pytest

import trtllm_pp_progress

PACKAGE = Path(trtllm_pp_progress.__file__).parent
ROOT = Path(__file__).parents[2]
NAME = "trtllm_pp_progress"

# From the ground up: a room may import from the floors below its own.
FLOORS = [
    ["settings", "patching", "mpi", "door", "tools/host"],
    ["driver", "vllm", "tools/job"],
    ["progress"],
    ["pyexecutor", "tools/probe"],
    ["installation"],
    ["__init__", "telemetry", "tools/bench", "tools/doctor"],
    ["auto", "tools/watch"],
    ["cli"],
    ["__main__"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
STDLIB_ONLY = ("settings", "mpi", "door", "driver", "progress", "patching")
READS_ENVIRONMENT = {  # and why these may, besides settings/
    "installation/run.py": "passes the environment on to the command",
    "tools/doctor/report.py": "reports the variables that matter",
    "tools/doctor/start.py": "asks what a launcher says that this process is",
    "tools/job/role.py": "asks what a launcher says that this process is",
    "tools/job/world.py": "asks, before MPI starts, which library would be loaded here",
    "tools/bench/start.py": "asks whether mpi4py may start MPI",
    "tools/probe/start.py": "asks whether mpi4py may start MPI, and what may have kept it from it",
    "tools/job/launch.py": "passes the environment on to the ranks",
    "mpi/cores.py": "asks what a launcher says of the ranks of this host",
    "telemetry.py": "warns of another library's variable",
    "tools/job/environment.py": "reports the variables that change what is measured",
    "vllm/settings.py": "finds a variable that is no setting any more",
}


def files():
    """Return every module of the package but the script of `run`, which no module imports."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "bootstrap" not in path.parts)


def room(path):
    """Return the room a file belongs to: its folder, or its own name at the top."""
    relative = path.relative_to(PACKAGE)
    return relative.parent.as_posix() if len(relative.parts) > 1 else relative.stem


def imports(tree):
    """List the modules imported anywhere in a file, also inside functions, with the names taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
            assert node.level == 0, "relative import"


def room_of(module, name):
    """Return the room of this package that an import leads to, None for another package's."""
    parts = module.split(".")
    if parts[0] != NAME:
        return None
    parts = [*parts[1:], *([name] if name else [])]
    found = [known for known in FLOOR if "/".join(parts[: known.count("/") + 1]) == known]
    return found[0] if found else "__init__"


def own_rooms(tree):
    """List the rooms of this package that a file imports from."""
    return [found for module, name in imports(tree) if (found := room_of(module, name))]


def violations(where, tree):
    """List the rooms that a file of room `where` imports although they are not below it."""
    return [found for found in own_rooms(tree) if found != where and FLOOR[found] >= FLOOR[where]]


def private_imports(where, tree):
    """List the private names that a file imports from another room."""
    return [
        f"{module}.{name}"
        for module, name in imports(tree)
        if (found := room_of(module, name)) and found != where
        if any(part.startswith("_") and not part.endswith("__") for part in [*module.split("."), name or ""])
    ]


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


def long_functions(tree, limit=50):
    """List the functions of more than `limit` lines."""
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= limit
    ]


def parsed(path):
    """Return a file's syntax tree."""
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    """No module imports its own room's users, not even inside a function; a new room is placed on a floor first."""
    if path.name == "__init__.py" and room(path) not in FLOOR:
        return  # a hallway: only rooms behind it
    assert room(path) in FLOOR
    assert violations(room(path), parsed(path)) == []


@pytest.mark.parametrize("path", [*files(), *sorted((ROOT / "perf").rglob("*.py"))], ids=str)
def test_private_names_stay_in_their_room(path):
    """Neither a module nor a name that begins with an underscore is imported from elsewhere."""
    where = room(path) if path.is_relative_to(PACKAGE) else "perf"
    assert private_imports(where, parsed(path)) == []


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_can_be_read_in_one_sitting(path):
    """At most 250 lines a module, 50 a function."""
    assert len(path.read_text().splitlines()) <= 250
    assert long_functions(parsed(path)) == []


def test_there_are_few_rooms():
    """A stranger can hold them in mind."""
    assert len(set(FLOOR) - {"__init__", "__main__"}) <= 18
    assert len(FLOORS) <= 9
    assert {room(path) for path in files()} - {"tools"} == set(FLOOR)


def test_the_page_draws_these_floors():
    """A drawing that nobody holds to the code is soon of another house."""
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    drawn = [line.split() for line in page.split("## The rooms")[1].split("```")[1].splitlines() if line]
    assert drawn == [[str(number), *rooms] for number, rooms in reversed(list(enumerate(FLOORS)))]


@pytest.mark.parametrize("where", STDLIB_ONLY, ids="room {}".format)  # pytest-mpi takes an id `mpi` for its own
def test_the_core_needs_the_standard_library_alone(where):
    """The engine and what is around it import nothing from outside."""
    for path in (PACKAGE / where).glob("*.py"):
        foreign = {module.split(".")[0] for module, _ in imports(parsed(path))}
        assert foreign <= set(sys.stdlib_module_names) | {NAME}


def test_the_host_knows_nothing_of_the_patch():
    """It is the peer to measure against: no module of it imports anything of ours but itself."""
    for path in (PACKAGE / "tools" / "host").glob("*.py"):
        assert set(own_rooms(parsed(path))) <= {"tools/host"}


def test_nothing_of_the_core_imports_an_adapter():
    """The receive policy for vLLM is an addition that the core does not know; doctor and `run` say what it would do."""
    for path in files():
        if room(path) != "vllm":
            found = [module for module, name in imports(parsed(path)) if room_of(module, name) == "vllm"]
            assert set(found) <= ({f"{NAME}.vllm.diagnosis"} if room(path) in ("tools/doctor", "cli") else set())


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_settings_read_the_environment(path):
    """Everything else gets its settings handed, but for what is listed here with its reason."""
    relative = path.relative_to(PACKAGE).as_posix()
    assert reads_environment(parsed(path)) == (
        relative in READS_ENVIRONMENT or relative in ("settings/schema.py", "settings/core.py")
    )


@pytest.mark.parametrize("path", sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("perf/**/*.py"), *files()]), ids=str)
def test_nobody_edits_the_import_path(path):
    """What has to be importable is named in setup.cfg."""
    edits = [
        line
        for line in path.read_text().splitlines()
        if (line.startswith("sys.path") and "=" in line) or line.startswith("sys.path.insert")
    ]
    assert edits == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("progress", "from trtllm_pp_progress.pyexecutor.grafts import Grafts"),
        ("progress", "def later():\n    import trtllm_pp_progress.installation.install"),
        ("settings", "from trtllm_pp_progress import install"),
        ("tools/host", "from trtllm_pp_progress.tools import bench"),
        ("tools/host", "from trtllm_pp_progress.tools.bench import rows"),
    ],
)
def test_an_import_that_goes_up_would_be_seen(where, source):
    """Control: upward imports in each form are found."""
    assert violations(where, ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["from trtllm_pp_progress.progress.engine import _x", "from trtllm_pp_progress.progress import _engine"],
)
def test_a_private_import_would_be_seen(source):
    """Control: private names and private modules."""
    assert private_imports("installation", ast.parse(source))


def test_a_long_function_would_be_seen():
    """Control: 51 lines are too many."""
    assert long_functions(ast.parse("def f():\n" + "    x = 1\n" * 50))


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"]
)
def test_a_read_of_the_environment_would_be_seen(source):
    """Control: each way to read it is found."""
    assert reads_environment(ast.parse(source))
