"""The options of a plugin: fields of its dataclass, each documented by the docstring below it."""

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
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from distcore.errors import StrategyError
from distcore.hints import nearest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

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
    """Return the options of a plugin's class, in the order of its fields; empty for no dataclass.

    A field of a dataclass type gives one option per inner field: ``columns.text``. ``above`` is the
    prefix of each name.
    """
    docs = field_docs(cls)
    inner = _dataclasses_in(cls)
    options = []
    for field in _fields(cls):
        if field.name in inner:
            options += options_of(inner[field.name], f"{above}{field.name}.")
            continue
        option = Option(
            name=f"{above}{field.name}",
            type=_type_text(field.type),
            default=_default_text(field),
            doc=docs.get(field.name, ""),
        )
        options.append(option)
    return options


def build(kind: str, name: str, cls: type[T], options: Mapping[str, Any]) -> T:
    """Build an instance of ``cls`` from ``options``, validated against its dataclass fields.

    ``kind`` (``strategy``, ``task`` or ``extension``) and ``name`` are for messages. Raises
    StrategyError, one line, for an unknown option or a value that does not fit.
    """
    # Slow to import, and not needed to list plugins.
    from pydantic import ValidationError

    from distcore.config.messages import first_problem

    if unknown := [*_unknown(cls, options)]:
        parts: list[str] = []
        for index, (option, names) in enumerate(unknown):
            part = f"unknown option {option!r}{nearest(option, names)}"
            is_last_of_level = index + 1 == len(unknown) or unknown[index + 1][1] != names
            if is_last_of_level:
                part += f" (options: {', '.join(names) or 'none'})"
            parts.append(part)
        raise StrategyError(f"{kind} {name!r}: {'; '.join(parts)}")
    if not dataclasses.is_dataclass(cls):
        return cls()
    try:
        built: T = _adapter(cls).validate_python(_with_words(kind, name, cls, options))
        return built
    except ValidationError as error:
        path, value, rules = first_problem(error)
        assignment = "" if rules == "field required" else f" = {value!r}"
        raise StrategyError(
            f"{kind} {name!r}: {'.'.join(path) or 'options'}{assignment}: {rules}"
        ) from None


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Return what validates the options of a class: pydantic takes milliseconds to make it."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def values_of(plugin: object) -> dict[str, Any]:
    """Return the option values of ``plugin`` by name, as JSON values; empty for no dataclass.

    Raises TypeError for a value without a JSON form.
    """
    if not dataclasses.is_dataclass(plugin):
        return {}
    from pydantic.errors import PydanticSchemaGenerationError
    from pydantic_core import PydanticSerializationError

    try:
        cls: Any = type(plugin)
        dumped: dict[str, Any] = _adapter(cls).dump_python(plugin, mode="json", warnings="error")
    except (PydanticSchemaGenerationError, PydanticSerializationError) as error:
        raise TypeError(str(error)) from None
    return {field.name: dumped[field.name] for field in _fields(type(plugin))}


def _fields(cls: type[object]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that its constructor takes; none of another class."""
    if not dataclasses.is_dataclass(cls):
        return []
    return [field for field in dataclasses.fields(cls) if field.init]


def _unknown(
    cls: type[object], options: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Yield each unknown option, and the options that its level has."""
    names = [field.name for field in _fields(cls)]
    for name, value in options.items():
        if name not in names:
            yield f"{above}{name}", [f"{above}{other}" for other in names]
        elif isinstance(value, Mapping) and (inner := _dataclasses_in(cls).get(name)):
            yield from _unknown(inner, value, f"{above}{name}.")


def _with_words(
    kind: str, name: str, cls: type[object], options: Mapping[str, Any]
) -> dict[str, object]:
    """Return ``options`` with the words on and off, which YAML reads as booleans."""
    from distcore.config.values import in_words

    types = _types(cls)
    words: dict[str, object] = {}
    for option, value in options.items():
        try:
            words[option] = in_words(value, types.get(option, object))
        except ValueError as error:
            raise StrategyError(f"{kind} {name!r}: {option} = {value!r}: {error}") from None
    return words


def _dataclasses_in(cls: type[object]) -> dict[str, type[object]]:
    """Return the fields whose type is a dataclass, by name."""
    inner: dict[str, type[object]] = {}
    for name, kind in _types(cls).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner[name] = kind
    return inner


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
    """Return the docstrings under the fields of a class itself, each on one line."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    definition, *_ = tree.body
    if not isinstance(definition, ast.ClassDef):
        return {}
    docs = {}
    for field, below in pairwise(definition.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
            continue
        doc = below.value.value
        if isinstance(doc, str):
            words = doc.replace("``", "").split()
            docs[field.target.id] = " ".join(words)
    return docs


SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _type_text(annotation: object) -> str:
    """Return an annotation for users: ``float ≥ 0``, ``'mean' | 'sum'``."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"Literal\[([^\[\]]*)\]", _with_bars, text)
    return re.sub(r"Annotated\[([\w.]+), Field\(([^()]*)\)\]", _with_bounds, text)


def _with_bars(match: re.Match[str]) -> str:
    return match[1].replace('"', "'").replace(", ", " | ")


def _with_bounds(match: re.Match[str]) -> str:
    bounds = []
    for bound in match[2].split(","):
        name, value = bound.strip().split("=")
        bounds.append(f"{SIGNS.get(name, name)} {value}")
    return f"{match[1]} {' and '.join(bounds)}"


def _default_text(field: dataclasses.Field[object]) -> str:
    """Return the ``repr`` of a field's default; empty if the option is required."""
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return ""
