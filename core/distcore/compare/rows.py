"""The rows of a comparison: one job under different strategies; refused where a row's job is another one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distcore.config import RunConfig, flatten, load_config, parse_settings
from distcore.engine.resolve import build_strategy
from distcore.errors import ConfigError, StrategyError, nearest
from distcore.jobs.train import check
from distcore.launchers import join
from distcore.plugin.contract import Capabilities
from distcore.plugin.hooks import capabilities_of
from distcore.plugin.shorthand import expand_shorthand

FREE = frozenset({
    "strategy", "strategy_options", "nproc", "micro_batch_size", "preset", "loader.workers", "timeout", "max_restarts",
    "out", "resume", "resume_changed", "log_level", "log_level_replica",
})  # fmt: skip
"""Keys that may differ from row to row: how the job is done. Every other key says what the job is."""
NOT_FOR_ROWS = frozenset({"strategy", "out", "resume", "resume_changed", "max_restarts"})
"""Keys that a row of its own cannot set."""
LAWS = ("order", "gradient", "clipping", "evaluation")
"""What a strategy may declare not to keep, and a reader of the table has to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be compared, and how: the flags of ``distcore compare``."""

    config: str | None
    """A config file, or none."""
    changes: Mapping[str, Any]
    """Values over it, by dotted key."""
    strategies: str
    """Rows by strategy, with commas between."""
    row: Sequence[str]
    """More rows, each ``NAME KEY=VALUE …``."""
    reference: str | None
    """The row to measure distances from; ``None``: the first."""
    allow_different: str
    """Keys of the job in which rows may differ, with commas between."""
    skip_missing: bool
    rounds: int
    interleave: bool
    warm_up: int
    """First steps of a run, which are shown apart."""
    communication: bool
    """Whether to measure it, in one more run of every row."""
    out: str | None
    """The folder to write to; ``None``: a new one under runs/."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row: its name as the user wrote it, and its config with nothing left to choose."""

    name: str
    folder: Path
    """Where the runs of this row go."""
    config: RunConfig
    reason: str | None = None
    """Why it cannot run; its config is what was asked then."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """What must be the same in all rows, by dotted key."""
    differs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys in which it differs from the reference all the same: its own value and the reference's."""
    exempt: tuple[str, ...] = ()
    """Laws that the strategy declares not to keep, with its reasons."""


def rows_of(request: Request, out: Path) -> tuple[list[Row], str]:
    """Return the rows and the name of the reference; raises DistcoreError, one line, before anything has started."""
    if rank_info := join(os.environ):
        raise ConfigError(
            f"compare: {rank_info.launcher} started this process as a rank; compare starts its own, run it alone"
        )
    asked = asked_for(request.strategies, request.row)
    reference = request.reference or next(iter(asked))
    if reference not in asked:
        raise ConfigError(f"--reference {reference}: no such row{nearest(reference, asked)} (rows: {', '.join(asked)})")
    load_config(request.config, dict(request.changes))  # what is wrong for all rows is said without naming one
    rows = [
        _row(request, name, settings, out / "runs" / f"{number:02d}-{re.sub(r'[^0-9A-Za-z.=-]+', '-', name)}")
        for number, (name, settings) in enumerate(asked.items())
    ]
    if all(row.reason for row in rows):
        raise ConfigError(f"no row can run: row {rows[0].name!r}: {rows[0].reason}")
    return compared(rows, reference, request.allow_different), reference


def asked_for(strategies: str, own: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Map name of a row to its own settings, in order: names split at commas, then one row for each of ``own``."""
    found: dict[str, dict[str, Any]] = {}
    names = [[name.strip()] for name in strategies.split(",")] if strategies else []
    for words in (*names, *(_words(text) for text in own)):
        name = " ".join(words)
        if not words or not words[0]:
            raise ConfigError(f"--strategies {strategies}: expected names with commas between them")
        if name in found:
            raise ConfigError(
                f"row {name!r} is asked for twice; a row with --row 'NAME KEY=VALUE' may have its own keys"
            )
        found[name] = {"strategy": words[0], **_settings(words[1:], name)}
    if not found:
        raise ConfigError("compare: no rows; give --strategies NAME,NAME or --row 'NAME KEY=VALUE'")
    return found


def compared(rows: list[Row], reference: str, allowed: str) -> list[Row]:
    """Note where rows differ from the reference; raises ConfigError for a difference that is not ``allowed``."""
    base = next(row for row in rows if row.name == reference)
    keys = [key.strip() for key in allowed.split(",") if key.strip()]
    for key in keys:
        if not any(_is_under(known, key) for known in base.job or flatten(base.config.model_dump(mode="json"))):
            raise ConfigError(f"--allow-different {key}: no such key{nearest(key, base.job)}")
    return [row if row.reason or base.reason else _compared(row, base, keys) for row in rows]


def _compared(row: Row, base: Row, allowed: list[str]) -> Row:
    keys = sorted(row.job.keys() | base.job.keys())
    differs = {k: (row.job.get(k), base.job.get(k)) for k in keys if row.job.get(k) != base.job.get(k)}
    refused = {key: both for key, both in differs.items() if not any(_is_under(key, above) for above in allowed)}
    if refused:
        said = "; ".join(f"{key} = {mine!r}, {base.name!r} has {other!r}" for key, (mine, other) in refused.items())
        raise ConfigError(
            f"row {row.name!r}: not comparable: {said}; make it the same, or accept and mark it with "
            f"--allow-different {','.join(refused)}"
        )
    return replace(row, differs=differs)


def _is_under(key: str, above: str) -> bool:
    return key == above or key.startswith(f"{above}.")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"--row {text}: {str(error).lower()}") from None


def _settings(words: list[str], name: str) -> dict[str, Any]:
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or key in NOT_FOR_ROWS:
            why = f"{key} is not a row's to set" if equals else f"expected KEY=VALUE, found {word!r}"
            raise ConfigError(f"--row {name!r}: {why}; write --row 'NAME KEY=VALUE', such as 'NAME seed=1'")
    return parse_settings(words)


def _row(request: Request, name: str, settings: dict[str, Any], folder: Path) -> Row:
    config = load_config(request.config, _changes(request, settings))
    try:
        config, declared = _ready(config, settings, folder)
    except (ConfigError, StrategyError) as error:
        if not request.skip_missing:
            raise ConfigError(f"row {name!r}: {error}") from None
        return Row(name=name, folder=folder, config=config, reason=" ".join(str(error).split()))
    leaves = flatten(config.model_dump(mode="json"))
    job = {key: value for key, value in leaves.items() if not any(_is_under(key, free) for free in FREE)}
    if "schedule" in declared.owns:
        job["schedule.name"] = f"{config.strategy}'s own"
    exempt = tuple(f"law {law}: {declared.exempt[law]}" for law in LAWS if law in declared.exempt)
    return Row(name=name, folder=folder, config=config, job=job, exempt=exempt)


def _changes(request: Request, settings: dict[str, Any]) -> dict[str, Any]:
    """The flags, and over them the row's own; options in a file are for the strategy that it names."""
    in_file = load_config(request.config, {}).strategy.partition(":")[0] if request.config else None
    foreign: dict[str, Any] = {"strategy_options": {}} if settings["strategy"].partition(":")[0] != in_file else {}
    return foreign | dict(request.changes) | settings


def _ready(config: RunConfig, settings: Mapping[str, Any], folder: Path) -> tuple[RunConfig, Capabilities]:
    """Resolve a row's config as ``distcore train`` will, with its data in the cache."""
    config = expand_shorthand(config.model_copy(update={"out": str(folder)}))
    declared = capabilities_of(config.strategy, build_strategy(config))
    if declared.processes == "one" and "nproc" not in settings:
        config = config.model_copy(update={"nproc": 1})
    config, _ = check(config)
    return config, capabilities_of(config.strategy, build_strategy(config))
