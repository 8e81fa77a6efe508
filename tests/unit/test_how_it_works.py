"""docs/how-it-works.md names the code: every name in it is defined there, and every room is on its list."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "trtllm_pp_progress"
ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "how-it-works.md").read_text()
DRAWING = re.compile(r"```.*?```", flags=re.S)
FILES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c"))


def in_code_font(page):
    """Return the names in code font, and those in drawings that cannot be plain words: a_b, A.b, AbCd and a()."""
    named = re.compile(r"\b(?:\w+_\w+|[A-Z]\w*\.\w+|[A-Z]+[a-z]\w*[A-Z]\w*)|\b\w+(?=\()")
    drawn = named.findall(" ".join(DRAWING.findall(page)))
    return sorted({*re.findall(r"`([^`\n]+)`", DRAWING.sub("", page)), *drawn})


def defined():
    """Return what the package defines, as `name` and `Class.name`: functions, classes, constants and fields."""
    names = set()
    for path in FILES:
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
            names |= {function.name for function in functions} | set(of_body(tree))
            for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
                names |= {owner.name, *(f"{owner.name}.{name}" for name in of_body(owner))}
    return names


def of_body(node):
    """Yield what a module or class defines itself."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


DEFINED = defined()
MODULES = {path.stem for path in FILES} | {path.parent.name for path in FILES}


def exists(name):
    """Tell whether a name is a file or folder by its path in the package or the checkout, a module, or defined."""
    if "/" in name or name.endswith((".py", ".c")):
        return any(any(base.glob(name)) for base in (PACKAGE, ROOT))
    return name in DEFINED | MODULES


@pytest.mark.parametrize("name", in_code_font(PAGE))
def test_a_name_on_the_page_is_in_the_code(name):
    """Renaming without the page would leave a newcomer lost."""
    assert exists(name)


@pytest.mark.parametrize(
    "name",
    [
        "Standby",
        "nowhere.py",
        "nowhere/",
        "Engine.never_there",
        "Settings.drive",
        "keeper.py",
        "pickled",
        "Sends drive",
    ],
)
def test_a_name_that_is_gone_would_be_seen(name):
    """Control: a word, a file, a folder, a method, another class's, half a path, a word of comments, two names."""
    assert not exists(name)


def test_names_in_drawings_are_looked_at_too():
    """Control: what cannot be a plain word is a name, plain words are none."""
    page = "`Engine` does it\n```\nrelay -> never_there -> Engine.gone -> NoClass -> start() with the GIL\n```\n"
    assert in_code_font(page) == ["Engine", "Engine.gone", "NoClass", "never_there", "start"]


def test_every_room_is_on_the_page():
    """A new folder of the package gets its line."""
    rooms = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert {room for room in rooms if f"`{room}/`" not in PAGE} == set()


def test_the_page_has_ten_words_at_most():
    """Each of which has one meaning."""
    words = re.findall(r"^\| \*([\w ]+)\* \|", PAGE, flags=re.M)
    assert len(words) == len(set(words)) <= 10
