"""Docstrings: every public thing says in one line what it does. Documents: their links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

import trtllm_pp_progress

PACKAGE = Path(trtllm_pp_progress.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("perf/**/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_leads_to_a_file(path):
    """Those to files of this repository."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", path.read_text()) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def undocumented(tree):
    """List public modules, classes, functions and methods whose docstring does not begin with a sentence."""
    bad = []

    def look(node, name):
        first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        words = (
            first if isinstance(node, ast.Module) else first[:1].upper() + first[1:]
        )  # a module's may begin with a name
        if not first or first != words or first[-1] not in ".:":
            bad.append(name)
        for child in getattr(node, "body", []):
            public = isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ) and not child.name.startswith("_")
            if public and isinstance(node, ast.Module | ast.ClassDef) and not is_overload(child):
                look(child, f"{name}.{child.name}")

    look(tree, "module")
    return bad


def is_overload(node):
    """Whether a function is one of several signatures."""
    return any(
        getattr(decorator, "id", getattr(decorator, "attr", "")) == "overload" for decorator in node.decorator_list
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_is_documented(path):
    """The first paragraph is a sentence: it begins with a capital and ends with a period."""
    assert undocumented(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_functions_first_line_is_a_sentence(path):
    """Functions and methods say what they do on the very first line, which ends with a period."""
    bad = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (doc := ast.get_docstring(node)):
            first = doc.split("\n")[0]
            if not first.endswith("."):
                bad.append(f"{node.name}: {first}")
    assert bad == []


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        ('"""M."""\ndef f(): pass', ["module.f"]),
        ('"""M."""\ndef f():\n    """do it."""', ["module.f"]),
        ('"""M."""\ndef f():\n    """Do it"""', ["module.f"]),
        ('"""M."""\nclass C:\n    """A class."""\n    def m(self): pass', ["module.C.m"]),
        ("x = 1", ["module"]),
        ('"""M."""\ndef _f(): pass', []),
        ('"""M."""\ndef f():\n    """Do it."""\n    def g(): pass', []),
    ],
)
def test_the_check_sees_what_is_missing(source, bad):
    """Control: a missing, lower-case or unfinished docstring is found, private and nested functions are free."""
    assert undocumented(ast.parse(source)) == bad
