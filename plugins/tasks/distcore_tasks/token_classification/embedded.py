"""The embedded dataset ``stdlib-code``: statements of Python's own source, with tagged names.

A row is a statement, or the first line of a compound one, split into words by Python's tokenizer;
strings are empty. Tags are in IOB form, from Python's parser:

=============  ================================================================
``MODULE``     an imported module: ``os . path``
``CLASS``      the name of a class in its definition
``FUNCTION``   the name of a function in its definition
``ARGUMENT``   a parameter of a function, or a keyword argument of a call
``CALL``       a called name, with its qualifiers: ``self . write``
``EXCEPTION``  a raised or caught exception
=============  ================================================================

Only its context determines the tag of a word: ``copy`` may have each of the first five, or none. No
row occurs twice. The same Python gives the same rows in the same order. They are read under its
license.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

from distcore_data import cached_folder
from distcore_tasks.shared import stdlib
from distcore_tasks.shared.schema import Schema
from distcore_tasks.shared.source_rows import Rows, given_rows
from distcore_tasks.token_classification.tags import TagChecker, TaggedWords, tagged_words

FORMAT = 1
"""Version of the rows, part of the cache key. Raise it when this module gives other rows."""
_WORDS = range(4, 33)
"""Lengths, in words, of the rows that are kept."""
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Position = tuple[int, int]
"""Line, from 1, and column, from 0."""


def stdlib_code() -> Rows[TaggedWords]:
    """Return the rows, from the cache if it has them. Collecting them takes some seconds."""
    folder = cached_folder(
        "embedded", f"stdlib-code-{stdlib.fingerprint('stdlib-code', *MADE_FROM)[:32]}", _write
    )
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    schema = Schema({}, TagChecker(), tagged_words)
    return given_rows("dataset stdlib-code", map(tuple, rows), schema)


MADE_FROM = (FORMAT, stdlib.DOCUMENTS)
"""Everything that the rows depend on, except for the Python version; part of the cache key."""
EMBEDDED: dict[str, Callable[[], Rows[TaggedWords]]] = {"stdlib-code": stdlib_code}
"""Map each dataset name, as in ``--data NAME``, to the function that returns its rows."""


def _write(folder: Path) -> None:
    rows: dict[tuple[str, ...], list[str]] = {}
    # in ASCII, columns in bytes are columns in characters
    for source in filter(str.isascii, stdlib.documents()):
        for words, tags in tagged_statements(source):
            if len(words) in _WORDS and any(tag != "O" for tag in tags):
                rows.setdefault(tuple(words), tags)
    (folder / "rows.json").write_text(json.dumps(list(rows.items())), encoding="utf-8")


def tagged_statements(source: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield words and tags of each statement without f-strings of an ASCII source."""
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
    ]
    words = ["''" if token.type == tokenize.STRING else token.string for token in tokens]
    starts, tags = [token.start for token in tokens], ["O"] * len(tokens)
    tree = ast.parse(source)
    for node in _nodes(tree):
        for kind, first, last in _mentions(node, starts, words):
            if tags[first] == "O":  # EXCEPTION wins over CALL in ``raise Error()``
                tags[first:last] = [f"B-{kind}", *[f"I-{kind}"] * (last - first - 1)]
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler) and not _has_fstring(node):
            first, last = _reach(node, starts, words)
            yield words[first:last], tags[first:last]


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and its descendants, without f-strings, whose positions differ
    between versions of Python.
    """
    if not isinstance(node, ast.JoinedStr):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)


def _has_fstring(node: ast.stmt | ast.ExceptHandler) -> bool:
    """Return True if the node contains an f-string outside inner statements."""
    children = (
        child
        for child in ast.iter_child_nodes(node)
        if not isinstance(child, ast.stmt | ast.ExceptHandler)
    )
    return any(isinstance(part, ast.JoinedStr) for child in children for part in ast.walk(child))


def _reach(
    node: ast.stmt | ast.ExceptHandler, starts: list[Position], words: list[str]
) -> tuple[int, int]:
    """Return the range of words of a statement, or of the first line of a compound one."""
    first, body = bisect_left(starts, (node.lineno, node.col_offset)), getattr(node, "body", None)
    if not body:
        return first, bisect_left(starts, _end(node))
    inner = [body[0], *getattr(body[0], "decorator_list", [])]
    last = bisect_left(starts, min((part.lineno, part.col_offset) for part in inner))
    while words[last - 1] == "@":  # the decorator's sign
        last -= 1
    return first, last


def _mentions(
    node: ast.AST, starts: list[Position], words: list[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield the names in a node: the tag of each, and its range of words."""

    def span(named: ast.expr) -> tuple[int, int]:
        """Return the range of words of a dotted name; for ``a().b`` only that of ``b``."""
        last = bisect_left(starts, _end(named))
        return (bisect_left(starts, _start(named)), last) if _is_dotted(named) else (last - 1, last)

    match node:
        case ast.Import(names=aliases):
            for alias in aliases:
                first = bisect_left(starts, (alias.lineno, alias.col_offset))
                yield "MODULE", first, first + 2 * alias.name.count(".") + 1
        case ast.ImportFrom():
            first = bisect_left(starts, _start(node)) + 1
            yield "MODULE", first, words.index("import", first)
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            first = words.index(node.name, bisect_left(starts, _start(node)))
            yield "CLASS" if isinstance(node, ast.ClassDef) else "FUNCTION", first, first + 1
        case ast.arg() | ast.keyword(arg=str()):
            first = bisect_left(starts, (node.lineno, node.col_offset))
            yield "ARGUMENT", first, first + 1
        case ast.Call(func=ast.Name() | ast.Attribute() as named):
            yield "CALL", *span(named)
        case (
            ast.Raise(exc=ast.Name() | ast.Attribute() as named)
            | ast.Raise(exc=ast.Call(func=ast.Name() | ast.Attribute() as named))
        ):
            yield "EXCEPTION", *span(named)
        case ast.ExceptHandler(type=ast.expr() as caught):
            for kind in caught.elts if isinstance(caught, ast.Tuple) else [caught]:
                yield "EXCEPTION", *span(kind)


def _is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Attribute) and _is_dotted(node.value)
    )


def _start(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt | ast.ExceptHandler) -> Position:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset
