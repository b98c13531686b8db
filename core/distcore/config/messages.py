"""Explain pydantic's validation errors in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError

from distcore.config.short_keys import OPTIONS, option_names
from distcore.errors import here_it_is, nearest

_BRANCHES = {"int", "float", "bool", "str", "none"}
_BRANCH_BEGINS = ("literal[", "dict[", "constrained-")


def first_problem(error: ValidationError) -> tuple[list[str], object, str]:
    """Return the path of the first wrong value, key by key, the value, and the rules that it breaks.

    A value of a union type breaks one rule per type: they are joined by "or".
    """
    problems = error.errors()
    path = _keys(problems[0]["loc"])
    rules = (p["msg"].removeprefix("Value error, ").lower() for p in problems if _keys(p["loc"]) == path)
    return path, problems[0]["input"], _plain(" or ".join(dict.fromkeys(rules)))


def _plain(rules: str) -> str:
    rules = re.sub(r", unable to (parse \w+ as an? \w+|interpret input)", "", rules.replace("or instance", "of keys"))
    rules = re.sub(r"input should be (?=greater|less)", "must be ", rules)
    return rules.replace("input should be ", "expected ").replace(" or expected ", " or ")


def explain(
    model: type[BaseModel], error: ValidationError, given: object, source: str, changes: Collection[str]
) -> str:
    """Return one line for the first wrong key of ``model``, with the number of others.

    ``given`` is the validated tree. ``source`` names the origin of its keys; keys in ``changes`` are from the command
    line.
    """
    problems = error.errors()
    path, value, rules = first_problem(error)
    unknown = problems[0]["type"] == "extra_forbidden"
    if unknown:  # the last part is the key itself, even if it looks like the name of a type
        path = [*_keys(problems[0]["loc"][:-1]), str(problems[0]["loc"][-1])]
    where = ".".join(path)
    source = "command line" if where in changes else source
    others = len({tuple(_keys(p["loc"])) for p in problems}) - 1
    more = f" (and {others} more)" if others else ""
    if unknown:
        known = [*_keys_at(model, path[:-1]), *(() if path[:-1] else _short_keys(model, given))]
        asked = "help(distcore.RunConfig)" if source == "RunConfig" else "distcore train --help all"
        hint = (
            here_it_is(path[-1], known)
            or nearest(path[-1], known)
            or _deeper(model, path[-1])
            or f" ({asked} lists them)"
        )
        if others > 1 and source not in ("command line", "RunConfig"):
            more += f"; if it is a file of another trainer: distcore migrate {source}"
        return f"{source}: unknown key {where!r}{hint}{more}"
    if problems[0]["type"] == "model_type":
        rules = f"expected {' or '.join(f'{where}.{key}' for key in _keys_at(model, path))}"
    return f"{source}: {where} = {value!r}: {rules}{more}"


def _short_keys(model: type[BaseModel], given: object) -> Collection[str]:
    if OPTIONS not in model.model_fields or not isinstance(given, Mapping):
        return ()
    return option_names(str(given.get("task", "auto"))) or ()


def _keys(location: tuple[int | str, ...]) -> list[str]:
    parts = (str(part) for part in location)
    return [part for part in parts if part not in _BRANCHES and not part.startswith(_BRANCH_BEGINS)]


def _deeper(model: type[BaseModel], key: str) -> str:
    paths = [f"{tree}.{key}" for tree in model.model_fields if key in _keys_at(model, [tree])]
    return f" (did you mean {paths[0]!r}?)" if paths else ""


def _keys_at(model: type[BaseModel], path: list[str]) -> Iterator[str]:
    for part in path:
        if part.isdigit():  # a place in a list
            continue
        annotation = model.model_fields[part].annotation
        annotation = next(iter(get_args(annotation)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return
        model = annotation
    yield from model.model_fields
