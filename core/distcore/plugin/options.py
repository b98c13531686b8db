"""The documented options of a plugin: the fields of its dataclass, each with the docstring below it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as text for the user."""

    name: str
    """Name of the field; what follows ``strategy_options.``."""
    type: str
    """The annotation, as written in the source."""
    default: str
    """``repr`` of the default; empty if the option is required."""
    doc: str
    """The docstring below the field, on one line; empty if there is none."""


def options_of(cls: type[object]) -> list[Option]:
    """Return the options of a plugin's class, in the order of its fields; none if it is no dataclass."""
    if not dataclasses.is_dataclass(cls):
        return []
    docs = field_docs(cls)
    return [
        Option(field.name, _type_text(field.type), _default_text(field), docs.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    ]


def field_docs(cls: type[object]) -> dict[str, str]:
    """Map each field of ``cls`` and of the classes it extends to the docstring under it.

    Read from the source, nearest class first; a class without source adds nothing.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _own_docs(base)
    return docs


def _own_docs(cls: type[object]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[field.target.id] = " ".join(value.value.replace("``", "").split())
    return docs


def _type_text(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default_text(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return ""
