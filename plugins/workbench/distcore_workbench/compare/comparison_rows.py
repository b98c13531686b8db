"""The rows of a comparison: the same job under different strategies. Rows with
different jobs are refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distcore import ConfigError, RunConfig, StrategyError, load_config, nearest, with_changes
from distcore.cli import JobRequest, canonical, parse_settings
from distcore.lab import EXECUTION, Resolved, check, flatten, resolve, strategies
from distcore.rank_environment import join

MAY_DIFFER = frozenset(
    {
        *EXECUTION,
        "preset",
        "loader.workers",
        "loader.forward_tokens",
        "timeout",
        "max_restarts",
        "out",
        "overwrite",
        "resume",
        "resume_changed",
        "log_level",
        "log_level_replica",
    }
)
"""Keys that may differ between rows: they define how the job runs. All other keys
define the job itself.
"""
NOT_FOR_ROWS = frozenset(
    {"strategy", "out", "overwrite", "resume", "resume_changed", "max_restarts"}
)
"""Keys that ``--row`` cannot set."""
LAWS = ("order", "gradient", "clipping", "evaluation")
"""Laws that matter to a reader of the table, if a strategy declares that it does not keep them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest(JobRequest):
    """The flags of ``distcore compare``."""

    strategies: str
    """Rows named by strategy, separated by commas."""
    row: Sequence[str]
    """More rows, each ``NAME KEY=VALUE …``."""
    reference: str | None
    """Name of the row to measure distances from; ``None``: the first."""
    allow_different: str
    """Keys of the job in which rows may differ, separated by commas."""
    skip_missing: bool
    """Leave out rows that cannot run here, instead of raising."""
    rounds: int
    """Times to run every row."""
    interleave: bool
    """Run all rows in every round, every second round in reverse; else all rounds of one row,
    then the next row.
    """
    warm_up: int
    """Optimizer steps at the start of a run that do not count for speed."""
    communication: bool
    """Measure communication, in one more run of every row."""
    out: str | None
    """The folder to write to; ``None``: a new one under runs/."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the comparison."""

    name: str
    """As the user wrote it."""
    folder: Path
    """Folder for the runs of this row."""
    config: RunConfig
    """Resolved; for a row that cannot run, as the user gave it."""
    reason: str | None = None
    """Why the row cannot run; ``None`` if it can."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Values that must be the same in all rows, by dotted key."""
    differs: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Keys of the job in which the row differs from the reference: its own
    value, the reference's value.
    """
    metrics: tuple[str, ...] = ()
    """The metrics that the task declares."""
    exempt: tuple[str, ...] = ()
    """Laws that the strategy declares not to keep, with its reasons."""


def rows_of(request: CompareRequest, out: Path) -> tuple[list[Row], str]:
    """Return the rows, and the name of the reference row; raises DistcoreError
    before anything has started.
    """
    refuse_ranks("compare")
    requested = parse_rows(request.strategies, request.row)
    reference = request.reference or next(iter(requested))
    if reference not in requested:
        names = ", ".join(requested)
        raise ConfigError(
            f"--reference {reference}: no such row{nearest(reference, requested)} (rows: {names})"
        )
    request.load()  # an error in all rows is reported without the name of a row
    rows = [
        _row(request, name, settings, out / "runs" / f"{number:02d}-{folder_name(name)}")
        for number, (name, settings) in enumerate(requested.items())
    ]
    if all(row.reason for row in rows):
        raise ConfigError(f"no row can run: row {rows[0].name!r}: {rows[0].reason}")
    return mark_differences(rows, reference, request.allow_different), reference


def refuse_ranks(what: str) -> None:
    """Raise ConfigError in a process that a launcher started as a rank; ``what`` starts
    processes of its own.
    """
    if rank_info := join(os.environ):
        raise ConfigError(
            f"{what}: {rank_info.launcher} started this process as a rank; {what} starts its own:"
            " run it directly"
        )


def folder_name(name: str) -> str:
    """Return ``name`` as the name of a folder that no shell takes apart."""
    return re.sub(r"[^0-9A-Za-z.=,+_-]+", "-", name)


def parse_rows(strategies: str, more: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Map the name of each row to its settings, in order.

    First come the rows of ``--strategies``, then those of ``--row``, ``more``. Raises ConfigError.
    """
    words_of_rows = []
    if strategies:
        words_of_rows += [[name.strip()] for name in _split(strategies)]
    words_of_rows += [_words(text) for text in more]
    rows: dict[str, dict[str, Any]] = {}
    for words in words_of_rows:
        if not words or not words[0]:
            raise ConfigError(f"--strategies {strategies}: expected names separated by commas")
        strategy, *settings = words
        name = " ".join(words)
        if name in rows:
            raise ConfigError(
                f"row {name!r} is given twice; --row 'NAME KEY=VALUE' makes a row with other"
                " settings"
            )
        rows[name] = {"strategy": strategy, **_settings(settings, name)}
    if not rows:
        raise ConfigError(
            "compare: no rows; give --strategies NAME,NAME or --row 'NAME KEY=VALUE', or the"
            " folders of runs"
        )
    return rows


def _split(strategies: str) -> list[str]:
    """Split at commas, but not between the options of one strategy:
    ``one,other:size=2,depth=1`` are two rows.
    """
    return re.split(r",(?![^,:]*=)", strategies)


def mark_differences(rows: list[Row], reference: str, allowed: str) -> list[Row]:
    """Return the rows with ``differs`` filled in.

    ``allowed``: dotted keys, separated by commas; a key stands for all keys below it too. Raises
    ConfigError for a difference that is not among them.
    """
    base = next(row for row in rows if row.name == reference)
    # A row that cannot run here has no job; its config still says which keys there are.
    known_keys = base.job or flatten(base.config.model_dump(mode="json"))
    allowed_keys = []
    for word in filter(None, map(str.strip, allowed.split(","))):
        spellings = (word, canonical(word))
        keys = [key for key in spellings if any(_is_under(known, key) for known in known_keys)]
        if not keys:
            raise ConfigError(f"--allow-different {word}: no such key{nearest(word, base.job)}")
        allowed_keys.append(keys[0])
    if base.reason:
        return rows
    return [row if row.reason else _compare(row, base, allowed_keys) for row in rows]


def _compare(row: Row, base: Row, allowed: list[str]) -> Row:
    """Return the row with its differences from ``base``; raises ConfigError for others."""
    differs = {}
    refused = []
    differences = []
    for key in sorted(row.job.keys() | base.job.keys()):
        value = row.job.get(key)
        value_of_base = base.job.get(key)
        if value == value_of_base:
            continue
        differs[key] = (value, value_of_base)
        if not any(_is_under(key, parent) for parent in allowed):
            refused.append(key)
            differences.append(f"{key} = {value!r}, {base.name!r} has {value_of_base!r}")
    if refused:
        raise ConfigError(
            f"row {row.name!r}: not comparable: {'; '.join(differences)}; make it the same, or"
            f" accept and mark it with --allow-different {','.join(refused)}"
        )
    return replace(row, differs=differs)


def is_of_job(key: str) -> bool:
    """Return True for a dotted key that defines the job, False for a key that
    defines how it runs.
    """
    return not any(_is_under(key, free) for free in MAY_DIFFER)


def _is_under(key: str, above: str) -> bool:
    return key == above or key.startswith(f"{above}.")


def _words(text: str) -> list[str]:
    """Split the value of ``--row`` as a shell does."""
    try:
        return shlex.split(text) or [""]
    except ValueError as error:
        raise ConfigError(f"--row {text}: {str(error).lower()}") from None


def _settings(words: list[str], name: str) -> dict[str, Any]:
    """Parse the ``KEY=VALUE`` words of row ``name``."""
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or key in NOT_FOR_ROWS:
            why = f"a row cannot set {key}" if equals else f"expected KEY=VALUE, found {word!r}"
            raise ConfigError(
                f"--row {name!r}: {why}; write --row 'NAME KEY=VALUE', such as 'NAME seed=1'"
            )
    return parse_settings(words)


def _row(request: CompareRequest, name: str, settings: dict[str, Any], folder: Path) -> Row:
    """Build one row.

    One that cannot run raises ConfigError, or has a ``reason`` if such rows are skipped.
    """
    config = load_config(request.config, _changes(request, settings))
    try:
        resolved = _resolve(config, settings, folder)
    except (ConfigError, StrategyError) as error:
        if not request.skip_missing:
            raise ConfigError(f"row {name!r}: {error}") from None
        reason = " ".join(str(error).split())
        return Row(name=name, folder=folder, config=config, reason=reason)
    config = resolved.config
    declared = resolved.capabilities
    leaves = flatten(config.model_dump(mode="json"))
    job = {key: value for key, value in leaves.items() if is_of_job(key)}
    if "schedule" in declared.owns:
        # Then the config does not say which schedule is trained with.
        job["schedule.name"] = f"{config.strategy}'s own"
    for key, value in flatten(dict(declared.own_values)).items():
        job[key] = f"{config.strategy}'s own {value}"
    exempt = [f"law {law}: {declared.exempt[law]}" for law in LAWS if law in declared.exempt]
    return Row(
        name=name,
        folder=folder,
        config=config,
        job=job,
        metrics=tuple(resolved.task.declared_metrics),
        exempt=tuple(exempt),
    )


def _changes(request: CompareRequest, settings: dict[str, Any]) -> dict[str, Any]:
    """Merge flags and the row's own settings.

    Strategy options of the file go to rows with the file's strategy only.
    """
    strategy_of_file = None
    if request.config:
        strategy_of_file, _, _ = load_config(request.config, {}).strategy.partition(":")
    strategy, _, _ = settings["strategy"].partition(":")
    changes: dict[str, Any] = {}
    if strategy != strategy_of_file:
        changes["strategy_options"] = {}
    return changes | dict(request.changes) | settings


def _resolve(config: RunConfig, settings: Mapping[str, Any], folder: Path) -> Resolved:
    """Resolve a row's config as ``distcore train`` does, and prepare its data."""
    changes: dict[str, Any] = {"out": str(folder)}
    # With an nproc of its own the row is left as it is: resolve() refuses what cannot be.
    if "nproc" not in settings and strategies.load_strategy(config).capabilities.processes == "one":
        changes["nproc"] = 1
    resolved = resolve(with_changes(config, changes))
    check(resolved)
    return resolved
