"""The options of a plugin: the fields of its dataclass, each documented by
the docstring below it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

from distcore.errors import StrategyError
from distcore.hints import nearest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as text for the user."""

    name: str
    """Name of the field, as after ``strategy_options.``."""
    type: str
    """The annotation, as written in the source."""
    default: str
    """``repr`` of the default; empty if the option is required."""
    doc: str
    """The docstring below the field, on one line; empty without one."""


def options_of(cls: type[object], above: str = "") -> list[Option]:
    """Return the options of a plugin's class, in the order of its fields; empty unless
    it is a dataclass.

    A field of a dataclass type gives one option per inner field: ``columns.text``. ``above`` is the
    prefix of each name.
    """
    docs, inner, options = field_docs(cls), _dataclasses_in(cls), []
    for field in _fields(cls):
        if field.name in inner:
            options += options_of(inner[field.name], f"{above}{field.name}.")
        else:
            text = _type_text(field.type)
            options.append(
                Option(f"{above}{field.name}", text, _default_text(field), docs.get(field.name, ""))
            )
    return options


def build(kind: str, name: str, cls: type[T], options: Mapping[str, Any]) -> T:
    """Build an instance of ``cls`` from ``options``, which are validated
    against its dataclass fields.

    ``kind`` (``strategy``, ``task`` or ``extension``) and ``name`` are for messages. Raises
    StrategyError, one line, for an unknown option or a value that does not fit.
    """
    # slow to import, and not needed to list plugins
    from pydantic import TypeAdapter, ValidationError

    from distcore.config.messages import first_problem

    if unknown := [*_unknown(cls, options)]:
        parts: list[str] = []
        for place, (option, known) in enumerate(unknown):
            is_last_of_level = place + 1 == len(unknown) or unknown[place + 1][1] != known
            listed = f" (options: {', '.join(known) or 'none'})" if is_last_of_level else ""
            parts.append(f"unknown option {option!r}{nearest(option, known)}{listed}")
        raise StrategyError(f"{kind} {name!r}: {'; '.join(parts)}")
    if not dataclasses.is_dataclass(cls):
        return cls()
    try:
        return TypeAdapter(cls).validate_python(_with_words(kind, name, cls, options))
    except ValidationError as error:
        path, value, rules = first_problem(error)
        given = "" if rules == "field required" else f" = {value!r}"
        raise StrategyError(
            f"{kind} {name!r}: {'.'.join(path) or 'options'}{given}: {rules}"
        ) from None


def values_of(plugin: object) -> dict[str, Any]:
    """Return the option values of ``plugin``, by name, as JSON values; empty unless
    it is a dataclass.

    Raises TypeError for a value without a JSON form.
    """
    if not dataclasses.is_dataclass(plugin):
        return {}
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError
    from pydantic_core import PydanticSerializationError

    try:
        dumped: dict[str, Any] = TypeAdapter(type(plugin)).dump_python(
            plugin, mode="json", warnings="error"
        )
    except (PydanticSchemaGenerationError, PydanticSerializationError) as error:
        raise TypeError(str(error)) from None
    return {field.name: dumped[field.name] for field in _fields(type(plugin))}


def _fields(cls: type[object]) -> list[dataclasses.Field[Any]]:
    return (
        [field for field in dataclasses.fields(cls) if field.init]
        if dataclasses.is_dataclass(cls)
        else []
    )


def _unknown(
    cls: type[object], options: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, list[str]]]:
    known = [field.name for field in _fields(cls)]
    for name, value in options.items():
        if name not in known:
            yield f"{above}{name}", [f"{above}{other}" for other in known]
        elif isinstance(value, Mapping) and (inner := _dataclasses_in(cls).get(name)):
            yield from _unknown(inner, value, f"{above}{name}.")


def _with_words(
    kind: str, name: str, cls: type[object], options: Mapping[str, Any]
) -> dict[str, object]:
    """Return ``options``, with the words on and off in place of the booleans as
    which YAML reads them.
    """
    from distcore.config.values import in_words

    types, words = _types(cls), dict[str, object]()
    for option, value in options.items():
        try:
            words[option] = in_words(value, types.get(option, object))
        except ValueError as error:
            raise StrategyError(f"{kind} {name!r}: {option} = {value!r}: {error}") from None
    return words


def _dataclasses_in(cls: type[object]) -> dict[str, type[object]]:
    types = _types(cls).items()
    return {name: it for name, it in types if isinstance(it, type) and dataclasses.is_dataclass(it)}


def _types(cls: type[object]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except (NameError, TypeError):  # a type that is imported for type checkers only
        return {}


def field_docs(cls: type[object]) -> dict[str, str]:
    """Map each field of ``cls`` and of the classes it extends to the docstring under it.

    Read from the source, nearest class first; a class without source adds nothing.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _own_docs(base)
    return docs


@cache
def _own_docs(cls: type[object]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[field.target.id] = " ".join(value.value.replace("``", "").split())
    return docs


SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _type_text(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(
        r"Literal\[([^\[\]]*)\]",
        lambda words: words[1].replace('"', "'").replace(", ", " | "),
        text,
    )
    return re.sub(r"Annotated\[([\w.]+), Field\(([^()]*)\)\]", _with_bounds, text)


def _with_bounds(match: re.Match[str]) -> str:
    bounds = (bound.strip().split("=") for bound in match[2].split(","))
    return f"{match[1]} " + " and ".join(
        f"{SIGNS.get(name, name)} {value}" for name, value in bounds
    )


def _default_text(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "" if field.default_factory is dataclasses.MISSING else repr(field.default_factory())
