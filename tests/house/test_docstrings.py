"""Every public class, function, method and field of what is published says what it is for.

An override is asked for its own docstring too: what a strategy does in a hook is for its reader,
not for the hook's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLISHED = ("core/distcore", "plugins/*/distcore_*", "examples/*/distcore_*")
FILES = sorted(
    file for folder in PUBLISHED for package in ROOT.glob(folder) for file in package.rglob("*.py")
)
WITH_FIELDS = {"dataclass", "NamedTuple", "TypedDict", "BaseModel"}
"""Decorators and bases that make fields of a class's annotations."""


def public(name: str) -> bool:
    return not name.startswith("_")


def called(node: ast.AST) -> str:
    """The last name of a decorator, base or annotation, without its
    arguments: ``dataclass`` of ``@dataclass(…)``.
    """
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def has_fields(cls: ast.ClassDef, models: set[str]) -> bool:
    """Whether annotations in ``cls`` are fields; ``models`` are the classes of its
    module that have fields.
    """
    return any(called(node) in WITH_FIELDS for node in cls.decorator_list) or any(
        called(base) in WITH_FIELDS | models for base in cls.bases
    )


def is_text(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def fields_without(cls: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """The public fields of ``cls`` with neither a string below them nor a ``description=``."""
    for field, below in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or called(field.annotation) == "ClassVar":
            continue
        described = any(
            isinstance(node, ast.keyword) and node.arg == "description" for node in ast.walk(field)
        )
        if public(name := ast.unparse(field.target)) and not described and not is_text(below):
            yield field.lineno, f"{cls.name}.{name}"


def undocumented(source: str) -> list[str]:
    """Line and name of every public class, function, method and field of a module that
    says nothing of itself.
    """
    names: list[tuple[int, str]] = []
    models: set[str] = set()

    def look(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.If | ast.Try):  # a definition that depends on what is installed
                look([*node.body, *node.orelse], owner)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if isinstance(node, ast.ClassDef) and has_fields(node, models):
                    models.add(node.name)
                if not public(node.name):
                    continue
                if not ast.get_docstring(node):
                    names.append((node.lineno, f"{owner}{node.name}"))
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{owner}{node.name}.")
                    names.extend(fields_without(node) if node.name in models else ())

    look(ast.parse(source).body, "")
    return [f"{line}: {name}" for line, name in sorted(names)]


def test_everything_public_has_a_docstring() -> None:
    files = [file for file in FILES if public(file.stem) or file.stem in ("__init__", "__main__")]
    gaps = {str(file.relative_to(ROOT)): undocumented(file.read_text()) for file in files}
    assert not {file: names for file, names in gaps.items() if names}


def test_a_gap_is_seen_wherever_it_stands() -> None:
    gaps = undocumented(
        "def said():\n    'Words.'\n    def inner(): ...\ndef bare(): ...\ndef _private():"
        " ...\nclass Empty:\n    plain: int\n    @property\n    def method(self): ...\n    def"
        " __len__(self): ...\n@dataclass(frozen=True)\nclass Options:\n    'Words.'\n    below: int"
        " = 1\n    'Words.'\n    field: int = Field(1, description='Words.')\n    constant:"
        " ClassVar[int] = 1\n    _private: int = 2\n    missing: int = 3\nclass"
        " Model(pydantic.BaseModel):\n    'Words.'\n    silent: int\nclass Heir(Model):\n   "
        " 'Words.'\n    inherited: int\nclass _Hidden(NamedTuple):\n    anything: int\n"
    )
    assert gaps == [
        "4: bare",
        "6: Empty",
        "9: Empty.method",
        "19: Options.missing",
        "22: Model.silent",
        "25: Heir.inherited",
    ]
