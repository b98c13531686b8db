"""The code of a pipeline that a user wrote, so that rows are made anew when it changes."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType

OURS = "distcore_tasks"
"""The package whose pipelines say by their ``version`` that they have changed."""


def own_classes(cls: type) -> list[type]:
    """Return the classes that a user, or another distribution, wrote: ``cls`` and its bases."""
    of_python = {"builtins", "abc", "typing"}
    return [
        base
        for base in cls.__mro__
        if base.__module__ not in of_python and base.__module__.partition(".")[0] != OURS
    ]


def digest_of_code(cls: type) -> str | None:
    """Return a digest of the code that a class can reach; ``None`` for one of this distribution.

    It covers the class, what it names in its file, and files of its own folder that are imported
    there. Comments, docstrings and layout are none of it, and neither are libraries.
    """
    classes = own_classes(cls)
    if not classes:
        return None
    digest = hashlib.sha256()
    for base in classes:
        for part in _code_of(base):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _code_of(cls: type) -> Iterator[str]:
    """Yield the code of a class, part by part; of one without a file that of its functions."""
    file = _file_of(cls)
    if file is None:
        yield cls.__qualname__
        for name, value in sorted(vars(cls).items()):
            if isinstance(value, FunctionType):
                yield name
                yield from _compiled(value.__code__)
        return
    yield from _reached(file, cls.__qualname__.partition(".")[0], set())


def _file_of(cls: type) -> Path | None:
    """Return the file of a class; ``None`` for one that was typed, as in a notebook."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return None
    path = Path(inspect.getsourcefile(cls) or file)
    return path if path.is_file() else None


def _compiled(code: CodeType) -> Iterator[str]:
    """Yield the instructions and constants of a function, and of those inside it."""
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
        else:
            yield repr(constant)


def _reached(file: Path, name: str, seen_files: set[Path]) -> Iterator[str]:
    """Yield the statements of a file that ``name`` reaches, in their order, and the files of its
    folder that they import.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    by_name = dict[str, list[ast.stmt]]()
    for statement in tree.body:
        for bound in _names_of(statement):
            by_name.setdefault(bound, []).append(statement)
    reached = _closure(name, by_name)
    for statement in tree.body:
        if statement not in reached:
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from _files_near(file, statement, seen_files)
        yield ast.unparse(_without_docstrings(statement))


def _closure(name: str, by_name: Mapping[str, list[ast.stmt]]) -> set[ast.stmt]:
    """Return the statements that bind ``name``, or a name that one of them uses."""
    reached = set[ast.stmt]()
    asked, left = {name}, deque([name])
    while left:
        for statement in by_name.get(left.popleft(), ()):
            if statement in reached:
                continue
            reached.add(statement)
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            left.extend(sorted(used - asked))
            asked |= used
    return reached


def _names_of(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds or, such as ``TABLE.update(…)``, may change."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(name.asname or name.name).partition(".")[0] for name in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _files_near(
    file: Path, statement: ast.Import | ast.ImportFrom, seen_files: set[Path]
) -> Iterator[str]:
    """Yield the content of the files beside ``file`` that a statement imports, and of those that
    these import.
    """
    for near in _modules_near(file, statement):
        if near in seen_files:
            continue
        seen_files.add(near)
        tree = ast.parse(near.read_text(encoding="utf-8"))
        yield ast.unparse(_without_docstrings(tree))
        for inner in ast.walk(tree):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                yield from _files_near(near, inner, seen_files)


def _modules_near(file: Path, statement: ast.Import | ast.ImportFrom) -> Iterator[Path]:
    """Yield the files that a statement imports from the folder of ``file`` or its package."""
    if isinstance(statement, ast.Import):
        roots, names = [file.parent, _top_of(file)], [name.name for name in statement.names]
    else:
        module = statement.module or ""
        if statement.level:
            roots = [file.parents[statement.level - 1]]
        else:
            roots = [file.parent, _top_of(file)]
        # A name may be a module of the package that it is imported from.
        names = [module, *(f"{module}.{name.name}".strip(".") for name in statement.names)]
    for root in dict.fromkeys(roots):
        for name in filter(None, names):
            path = root.joinpath(*name.split("."))
            yield from filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))


def _top_of(file: Path) -> Path:
    """Return the folder that holds the package of a file."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _without_docstrings(tree: ast.AST) -> ast.AST:
    """Take the docstrings out of a tree, and texts that stand below a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(statement: object) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
