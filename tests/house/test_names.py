"""Names say what they hold, and a page's first words say what it is about: two habits that
a reader stumbles over.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "core/distcore",
    "plugins/*/distcore_*",
    "plugins/*/tests",
    "examples",
    "tests",
    "benchmarks",
    "tools",
)
FILES = sorted(
    file for pattern in FOLDERS for folder in ROOT.glob(pattern) for file in folder.rglob("*.py")
)
VAGUE = "found"
"""A name for any result of any search. A name says whether it is the row, the
path or the strategy.
"""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all that a module names: variables, arguments,
    attributes, functions, classes, imports.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield node.lineno, name
            case ast.keyword(arg=str(name), value=value):
                yield value.lineno, name
            case (
                ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.ExceptHandler(name=str(name))
            ):
                yield node.lineno, name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((node.lineno, alias.asname or alias.name) for alias in aliases)
            case ast.Global(names=outer) | ast.Nonlocal(names=outer):
                yield from ((node.lineno, name) for name in outer)


def vague(source: str) -> list[int]:
    return sorted({line for line, name in names(ast.parse(source)) if name.strip("_") == VAGUE})


def begins_with_what(source: str) -> bool:
    words = (ast.get_docstring(ast.parse(source)) or "").split()
    return bool(words) and words[0].lower().rstrip(":,") == "what"


def test_no_name_says_only_that_something_was_searched() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in FILES}
    assert not [
        f"{file}:{line}"
        for file, text in texts.items()
        if VAGUE in text.lower()
        for line in vague(text)
    ]


def test_a_module_begins_with_its_subject() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in FILES}
    assert not [
        file
        for file, text in texts.items()
        if "what" in text[:200].lower() and begins_with_what(text)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for _, found in rows: pass",
        "rows = [found for found in rows]",
        "if (found := search()): pass",
        "self.found = 1",
        "call(found=1)",
        "def found(): pass",
        "def find(found): pass",
        "class _Found: pass\n_found = 1",
        "import search as found",
        "with search() as found: pass",
        "try: pass\nexcept OSError as found: pass",
        "match row:\n    case [found, *_]: pass",
        "match row:\n    case {'key': [*found]}: pass",
    ],
)
def test_the_name_is_seen_wherever_it_is_given(source: str) -> None:
    assert vague(source)


@pytest.mark.parametrize(
    "source", ['"""Rows that were found."""', "print('no strategy found')", "founded = 1  # found"]
)
def test_the_word_may_stand_in_sentences(source: str) -> None:
    assert not vague(source)


def test_only_the_first_word_of_a_page_counts() -> None:
    assert begins_with_what('"""What a strategy declares."""')
    assert not begins_with_what('"""Declare what a strategy needs."""')
    assert not begins_with_what("")
