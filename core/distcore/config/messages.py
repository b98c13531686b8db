"""Explain pydantic's validation errors in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from distcore.config.short_keys import OF_FLAGS, OPTIONS, option_names
from distcore.hints import hint_from_other_libraries, nearest

_BRANCHES = {"int", "float", "bool", "str", "none"}
_BRANCH_BEGINS = ("literal[", "dict[", "constrained-")


def first_problem(error: ValidationError) -> tuple[list[str], object, str]:
    """Return the path of the first wrong value, key by key, the value, and the
    rules that it breaks.

    A value of a union type breaks one rule per type: they are joined by "or".
    """
    problems = error.errors()
    first = problems[0]
    path = _keys(first["loc"])
    of_same_value = (problem for problem in problems if _keys(problem["loc"]) == path)
    return path, first["input"], _rules(of_same_value)


def _plain(rules: str) -> str:
    """Return pydantic's words about broken rules in plainer ones."""
    rules = re.sub(
        r", unable to (parse \w+ as an? \w+|interpret input)",
        "",
        rules.replace("or instance", "of keys"),
    )
    rules = re.sub(r"input should be (?=greater|less)", "must be ", rules)
    return rules.replace("input should be ", "expected ").replace(" or expected ", " or ")


def explain(
    model: type[BaseModel],
    error: ValidationError,
    given: object,
    source: str,
    changes: Collection[str],
) -> str:
    """Return one line for all wrong keys of ``model``: who corrects one need not come
    back for the next.

    ``given`` is the validated tree. ``source`` names the origin of its keys; keys in ``changes``
    are from the command line.
    """
    by_path: dict[str, list[ErrorDetails]] = {}
    for problem in error.errors():
        by_path.setdefault(".".join(_path_of(problem)), []).append(problem)
    parts: list[str] = []
    last_origin = ""
    unknown_keys = 0
    for where, problems in by_path.items():
        origin = "command line" if where in changes else source
        is_unknown = problems[0]["type"] == "extra_forbidden"
        unknown_keys += is_unknown and origin == source
        text = (
            unknown_key(model, where, given, origin)
            if is_unknown
            else _wrong_value(model, where, problems)
        )
        if any(_listing(origin) in part for part in parts):
            text = text.removesuffix(f" ({_listing(origin)})")
        parts.append(text if origin == last_origin else f"{origin}: {text}")
        last_origin = origin
    for where, text in _unknown_options(model, given):
        origin = "command line" if where in changes else source
        parts.append(text if origin == last_origin else f"{origin}: {text}")
        last_origin = origin
    line = "; ".join(parts)
    if unknown_keys > 2 and source not in ("command line", "RunConfig"):
        line += f"; if it is a file of another trainer: distcore migrate {source}"
    return line


def _path_of(problem: ErrorDetails) -> list[str]:
    """Return the keys of a problem; the last one of an unknown key is itself, even if it looks
    like a type's name.
    """
    if problem["type"] == "extra_forbidden":
        *above, unknown_key = problem["loc"]
        return [*_keys(tuple(above)), str(unknown_key)]
    return _keys(problem["loc"])


def unknown_key(model: type[BaseModel], where: str, given: object, source: str) -> str:
    """Return the problem of a key that is not known, with what was meant, if that can be told."""
    *above, key = where.split(".")
    known = [*_keys_at(model, above)]
    if not above:
        # At the top the options of the task and the names of flags are keys, too.
        known += _short_keys(model, given)
    hint = hint_from_other_libraries(key, known) or nearest(key, known) or _deeper(model, key)
    return f"unknown key {where!r}{hint or f' ({_listing(source)})'}"


def _unknown_options(model: type[BaseModel], given: object) -> Iterator[tuple[str, str]]:
    """Yield key and problem of each option that the task does not have.

    The task is built only from a config that is right, and would name them at another start.
    """
    if OPTIONS not in model.model_fields or not isinstance(given, Mapping):
        return
    short = option_names(str(given.get("task", "auto"))) or {}
    names = {option.partition(".")[0] for option in short.values()}
    options = given.get(OPTIONS) if names else None
    for name in options if isinstance(options, Mapping) else ():
        if name not in names:
            where = f"{OPTIONS}.{name}"
            hint = nearest(name, names)
            if name in short:
                hint = f" (did you mean {short[name]!r}?)"
            yield where, f"unknown key {where!r}{hint}"


def _listing(source: str) -> str:
    """Return what lists all keys."""
    asked = "help(distcore.RunConfig)" if source == "RunConfig" else "distcore train --help all"
    return f"{asked} lists them"


def _wrong_value(model: type[BaseModel], where: str, problems: list[ErrorDetails]) -> str:
    """Return the problem of a value that breaks the rules of its key."""
    value = problems[0]["input"]
    rules = _rules(problems)
    if problems[0]["type"] == "model_type":
        rules = (
            f"expected {' or '.join(f'{where}.{key}' for key in _keys_at(model, where.split('.')))}"
        )
    return f"{where} = {value!r}: {rules}"


def _rules(problems: Iterable[ErrorDetails]) -> str:
    """Return the rules that one value breaks, in plain words."""
    rules = (problem["msg"].removeprefix("Value error, ").lower() for problem in problems)
    return _plain(" or ".join(dict.fromkeys(rules)))


def _short_keys(model: type[BaseModel], given: object) -> Mapping[str, str]:
    """Return the keys that ``model`` takes beside its own, each with what it is short for."""
    if OPTIONS not in model.model_fields or not isinstance(given, Mapping):
        return {}
    return {**OF_FLAGS, **(option_names(str(given.get("task", "auto"))) or {})}


def _keys(location: tuple[int | str, ...]) -> list[str]:
    parts = (str(part) for part in location)
    return [part for part in parts if part not in _BRANCHES and not part.startswith(_BRANCH_BEGINS)]


def _deeper(model: type[BaseModel], key: str) -> str:
    paths = [f"{tree}.{key}" for tree in model.model_fields if key in _keys_at(model, [tree])]
    return f" (did you mean {paths[0]!r}?)" if paths else ""


def _keys_at(model: type[BaseModel], path: list[str]) -> Iterator[str]:
    """Yield the keys of the table at ``path``; none if the value there is no table."""
    for part in path:
        if part.isdigit():  # the number of an element in a list
            continue
        annotation = model.model_fields[part].annotation
        annotation = next(iter(get_args(annotation)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return
        model = annotation
    yield from model.model_fields
