"""DeepSpeed's own JSON config: read as people have it, every "auto" filled in, compared with distcore's config."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hjson

from distcore import ConfigError

Tree = dict[str, Any]
AUTO = "auto"

TEXT = frozenset({"nvme_path", "output_path", "output_file", "job_name", "type", "team", "group", "project"})
"""Keys whose value is text, whatever it looks like."""
TREES = frozenset({"zero_optimization", "fp16", "bf16", "optimizer", "scheduler"})
"""Sections that are read here."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one key of DeepSpeed's config has to be for this run.

    ``must``: set it, and a different value is a contradiction. ``match``: the same, but only where the JSON names the
    key. ``default``: set it unless the JSON has a value. ``auto``: fill in "auto", leave everything else alone.
    """

    path: str
    value: Any
    source: str
    """The key of distcore's config that the value comes from."""
    kind: Literal["must", "match", "default", "auto"] = "must"


def read(config: str | Mapping[str, Any] | None) -> Tree:
    """Return the JSON at a path, or an inline tree, with strings such as "true" and "8" as what they mean.

    Raises ConfigError, one line: not readable, not JSON, a section that is none.
    """
    if config is None:
        return {}
    tree: Tree = _typed(config if isinstance(config, Mapping) else _read_file(Path(config)))
    if "bfloat16" in tree:
        tree.setdefault("bf16", tree.pop("bfloat16"))
    for key in TREES & tree.keys():
        if not isinstance(tree[key], dict):
            raise ConfigError(f"{origin(config)}: {key} = {tree[key]!r}: expected keys and values")
    stage = tree.get("zero_optimization", {}).get("stage", AUTO)
    if stage != AUTO and stage not in range(4):
        raise ConfigError(f"{origin(config)}: zero_optimization.stage = {stage!r}: expected 0, 1, 2 or 3")
    return tree


def origin(config: str | Mapping[str, Any] | None) -> str:
    """Say where the JSON comes from."""
    return config if isinstance(config, str) else "strategy_options.config"


def fill(
    tree: Tree, claims: Iterable[Claim], where: str, later: Iterable[str] = (), unknown: Iterable[str] = ()
) -> Tree:
    """Return a copy of ``tree`` in which every claim holds and no "auto" is left, but at the paths of ``later``.

    Raises ConfigError, one line, that lists all that is ``unknown``, and all contradictions with both values and where
    each comes from.
    """
    filled = copy.deepcopy(tree)
    wrong = []
    for claim in claims:
        found = _get(filled, claim.path)
        if found == AUTO or (found is None and claim.kind in ("must", "default")):
            _put(filled, claim.path, claim.value)
        elif found is not None and claim.kind in ("must", "match") and not _same(found, claim.value):
            wrong.append(f"{claim.path} = {found!r} ({where}) but {claim.source} = {claim.value!r}")
    said = [f"{'; '.join(unknown)} (DeepSpeed would ignore it)"] if (unknown := list(unknown)) else []
    said += [f'contradictions, make them equal or write "auto": {"; ".join(wrong)}'] if wrong else []
    if said:
        raise ConfigError(f"{where}: {'; '.join(said)}")
    if left := sorted(set(_autos(filled)) - set(later)):
        raise ConfigError(f'{where}: nothing to fill in for "auto" of {", ".join(left)}; give a value')
    return filled


def _read_file(path: Path) -> Tree:
    try:
        tree = hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ConfigError(f"strategy_options.config = {str(path)!r}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"strategy_options.config = {str(path)!r}: not valid JSON: {reason}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"strategy_options.config = {str(path)!r}: expected an object, found {type(tree).__name__}")
    return dict(tree)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Tree:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return tree


def _typed(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _typed(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    if not isinstance(value, str) or key in TEXT:
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    return float(value) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.IGNORECASE) else value


def _same(found: Any, ours: Any) -> bool:
    if isinstance(ours, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(ours) and all(map(_same, found, ours))
    if isinstance(found, bool) or isinstance(ours, bool) or isinstance(found, str) or isinstance(ours, str):
        return bool(found == ours)
    if isinstance(found, int | float) and isinstance(ours, int | float):
        return abs(found - ours) <= 1e-12 * max(abs(found), abs(ours))
    return bool(found == ours)


def _get(tree: Tree, path: str) -> Any:
    value: Any = tree
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(tree: Tree, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value


def _autos(tree: Tree, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"
