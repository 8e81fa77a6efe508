"""The import hook: called once, right after an import, by whoever's loader, and it imports nothing itself."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from trtllm_pp_progress.patching.import_hook import when_imported

NAME = "hooked_package.hooked_module"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes the module, in a package; all traces go at the end."""
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("IMPORTED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)

    def write(body="VALUE = 1\n"):
        (folder / "hooked_module.py").write_text(body)
        importlib.invalidate_caches()

    write()
    yield write
    left, sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders], finders
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]
    assert left == []


def test_it_is_called_once_right_after_the_import(written):
    """With the module, whose code has run; before whoever imports it sees it."""
    seen = []
    when_imported(NAME, lambda module: seen.append((module.VALUE, module.__name__)))
    assert seen == []
    importlib.import_module(NAME)
    assert seen == [(1, NAME)]
    importlib.reload(sys.modules[NAME])
    assert len(seen) == 1


def test_the_module_is_as_if_nobody_had_looked(written):
    """Its loader is its own by the time its code runs, and so is its spec's."""
    written("LOADERS = __loader__, __spec__.loader\n")
    when_imported(NAME, lambda module: None)
    module = importlib.import_module(NAME)
    for loader in (*module.LOADERS, module.__loader__, module.__spec__.loader):
        assert type(loader).__name__ == "SourceFileLoader"


def test_asking_imports_nothing(written):
    """Neither the module nor its package, whatever other modules are imported meanwhile."""
    call_off = when_imported(NAME, lambda module: pytest.fail("not imported"))
    importlib.import_module("hooked_package")
    assert NAME not in sys.modules
    sys.modules.pop("hooked_package")
    assert sys.meta_path[0].find_spec("hooked_package.other", ["nowhere"]) is None
    assert sys.meta_path[0].find_spec(NAME, ["nowhere"]) is None
    assert "hooked_package" not in sys.modules
    call_off()


def test_called_off_it_is_not_called(written):
    """And calling it off again, or afterwards, is harmless."""
    call_off = when_imported(NAME, lambda module: pytest.fail("called off"))
    call_off()
    importlib.import_module(NAME)
    call_off()


def test_what_it_raises_fails_the_import(written):
    """The module is not left half imported, and the next import is not hooked any more."""

    def fail(module):
        raise ZeroDivisionError

    when_imported(NAME, fail)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    assert NAME not in sys.modules
    assert importlib.import_module(NAME).VALUE == 1


def test_an_import_that_fails_can_be_repeated(written):
    """The hook stays for the one that succeeds."""
    seen = []
    when_imported(NAME, seen.append)
    written("raise OSError('no driver')\n")
    with pytest.raises(OSError, match="no driver"):
        importlib.import_module(NAME)
    assert seen == []
    written("VALUE = 2  # written anew\n")
    module = importlib.import_module(NAME)
    assert (seen, module.VALUE) == ([module], 2)


def test_a_module_that_is_not_there_is_not_there(written, tmp_path):
    """The error is Python's own."""
    call_off = when_imported(f"{NAME}_of_nobody", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="of_nobody"):
        importlib.import_module(f"{NAME}_of_nobody")
    call_off()


def test_two_hooks_are_both_called(written):
    """Each has its own, in whatever order."""
    seen = []
    when_imported(NAME, lambda module: seen.append("first"))
    when_imported(NAME, lambda module: seen.append("second"))
    module = importlib.import_module(NAME)
    assert sorted(seen) == ["first", "second"]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_finder_behind_it_finds_in_its_own_way(written):
    """Whatever its loader is: the hook is told when that has run."""
    seen = []

    class Other:
        """Finds this one module in its own way."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            """Return a spec that makes a module of its own."""
            return ModuleSpec(name, Other) if name == NAME else None

        @staticmethod
        def create_module(spec):
            """Make it."""
            return ModuleType(spec.name)

        @staticmethod
        def exec_module(module):
            """Fill it."""
            module.VALUE = 3

    when_imported(NAME, lambda module: seen.append(module.VALUE))
    sys.meta_path.insert(1, Other)
    try:
        assert importlib.import_module(NAME).VALUE == 3
    finally:
        sys.meta_path.remove(Other)
    assert seen == [3]


def test_a_finder_that_asks_all_others_does_not_meet_it_in_a_circle(written):
    """Another package's, in front of it, which does what it does."""

    class Asking:
        """Asks every other finder."""

        def find_spec(self, name, path=None, target=None):
            """Return what one of them finds."""
            others = [finder for finder in sys.meta_path if finder is not self]
            return next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)

    seen = []
    when_imported(NAME, seen.append)
    other = Asking()
    sys.meta_path.insert(0, other)
    try:
        assert importlib.import_module(NAME) is seen[0]
    finally:
        sys.meta_path.remove(other)


def test_a_finder_of_the_old_kind_is_passed_over(written):
    """One with find_module() alone, of before Python 3.4: Python does without it, and so do we."""
    seen, old = [], object()
    when_imported(NAME, seen.append)
    finder, path = sys.meta_path[0], importlib.import_module("hooked_package").__path__
    sys.meta_path.insert(1, old)
    try:
        assert finder.find_spec(NAME, path) is not None
    finally:
        sys.meta_path.remove(old)
    importlib.import_module(NAME)
    assert len(seen) == 1
