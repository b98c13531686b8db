"""The settings of a job that keep its mathematics, and the values worth a trial here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distcore import RunConfig, load_config
from distcore.lab import strategies

FIRST = 2
"""Strategies that are tried before anything else."""
Setting = Mapping[str, Any]
"""Values by dotted config key, over those of the job; ``{}`` is the job as it is given."""
THREADS = "threads"
"""The one entry of a setting that is no config key: OMP_NUM_THREADS of the ranks.

``None`` is a share of the cores.
"""
Family = Sequence[Setting]
"""Settings of one kind, the fastest first as far as is known.

If that one is far behind, the others are left out.
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that can be set; its values are alternatives."""

    name: str
    """Its name in the table."""
    families: Sequence[Family]
    """The values, by kind."""
    possible: Callable[[Setting], bool] = lambda setting: True
    """Whether a setting with one of the values may run: the others are not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The resources of this machine for a job."""

    cores: int
    """CPU cores."""
    ranks: int
    """Most ranks to start: as the user says, or else one for each device or core."""
    threads: int | None
    """Computing threads of a rank that is alone; ``None`` where they are not to be varied."""
    compiles: bool
    """Whether there is a compiler."""
    forms: Sequence[Setting]
    """The other forms of the rows than the one that the job as given comes to."""


def setting_key(setting: Setting) -> str:
    """Return one text for settings that are equal."""
    return json.dumps(dict(setting), sort_keys=True)


def changes_in(setting: Setting) -> int:
    """Return the number of values that a setting changes: the fewer, the simpler the setting."""
    changes = len(setting.get("strategy_options", {}))
    for key, value in setting.items():
        if key != "strategy_options" and value is not None:
            changes += 1
    return changes


def name_of(setting: Setting) -> str:
    """Return a setting as the table shows it: ``NAME bucket_mb=5 nproc=2``, or ``as given``."""
    words = [str(setting["strategy"])] if "strategy" in setting else []
    for name, value in setting.get("strategy_options", {}).items():
        words.append(f"{name}={_text(value)}")
    for key, value in setting.items():
        if key not in ("strategy", "strategy_options") and value is not None:
            words.append(f"{key.rpartition('.')[2]}={_text(value)}")
    return " ".join(words) or "as given"


def with_setting(file: str | None, changes: Mapping[str, Any], setting: Setting) -> RunConfig:
    """Return the config of the job with a setting, not resolved.

    The arguments are those of ``load_config``, which raises.
    """
    config_keys = {key: value for key, value in setting.items() if key != THREADS}
    merged = dict(changes)
    if "strategy_options" in config_keys:
        # They replace the options in the flags, which may be those of another strategy.
        for key in changes:
            if key.startswith("strategy_options"):
                del merged[key]
    return load_config(file, merged | config_keys)


def axes(
    base: RunConfig, resolved: RunConfig, environment: Environment, strategies: Sequence[Family]
) -> list[Axis]:
    """Return the axes in the order in which they are tried: the one with most effect first.

    ``base`` is the config as given, ``resolved`` the same with every 'auto' replaced,
    ``strategies`` the strategies to try, each with its options, the one with the least traffic
    first. Those behind the first ``FIRST`` come late: each starts ranks for its trial, and is
    seldom faster where those are not.
    """
    threads = [[setting] for setting in _threads(resolved, environment)]
    ranks = [[{"nproc": count}] for count in _powers(environment.ranks) if count > 1]
    forms = [[form] for form in environment.forms]
    cuts = [[cut] for cut in micro_batches(resolved)]
    modes = [mode for mode in ("regions", "on") if environment.compiles and mode != base.compile]
    workers = [count for count in (1, 2) if count != base.loader.workers]
    recomputation = {"gradient_checkpointing": not base.gradient_checkpointing}
    shares_rows = partial(_shares_rows, resolved)
    every_axis = [
        Axis("strategy, ranks and threads", [*threads, *strategies[:FIRST]]),
        Axis("ranks", ranks),
        Axis("padding", forms),
        Axis("micro-batch", cuts, shares_rows),
        Axis("compile", [[{"compile": mode}] for mode in modes]),
        Axis("loader", [[{"loader.workers": count}] for count in workers]),
        Axis("other strategies", strategies[FIRST:], shares_rows),
        Axis("recomputation", [[recomputation]]),
    ]
    return [axis for axis in every_axis if axis.families]


def micro_batches(config: RunConfig) -> list[Setting]:
    """Return other ways to cut a step of a resolved config into micro-batches.

    They are by other bounds, and as one micro-batch of each rank.
    """
    rows_per_rank = config.global_batch_size // int(config.nproc)
    by_rows: list[Setting] = []
    for size in (rows_per_rank, rows_per_rank // 2, rows_per_rank // 4):
        if size and rows_per_rank % size == 0 and size != config.micro_batch_size:
            by_rows.append({"micro_batch_size": size, "micro_batch_tokens": None})
    tokens = config.micro_batch_tokens
    if tokens is None:
        return [{"micro_batch_size": "auto"}, *by_rows]
    by_tokens: list[Setting] = [
        {"micro_batch_tokens": 2 * tokens},
        {"micro_batch_tokens": tokens // 4},
    ]
    if not by_rows:
        return by_tokens
    by_cost: list[Setting] = []
    cost = config.loader.forward_tokens
    if cost != "auto":
        by_cost.append({"loader.forward_tokens": max(1, int(cost) // 4)})
        by_cost.append({"loader.forward_tokens": 4 * int(cost)})
    return [*by_cost, by_rows[0], *by_tokens]


def _shares_rows(config: RunConfig, setting: Setting) -> bool:
    """Return True if the ranks share the rows of a step in micro-batches of the setting's size."""
    size = setting.get("micro_batch_size")
    if not isinstance(size, int):
        return True
    ranks = int(setting.get("nproc", config.nproc))
    return config.global_batch_size % (size * ranks) == 0


def strategy_settings(
    base: RunConfig, name: str, one_process: bool, options: Sequence[Setting], ranks: int
) -> Family:
    """Return the settings of a strategy: its declared ``options``, added to the user's."""
    config = strategies.expanded(base)
    user_options = config.strategy_options if config.strategy == name else {}
    processes = {"nproc": 1 if one_process else ranks, THREADS: None}
    settings: list[Setting] = []
    for declared in options:
        merged = {**user_options, **declared}
        settings.append({"strategy": name, "strategy_options": merged, **processes})
    return settings


def options_tried(declared: Sequence[Setting], own: Setting) -> list[Setting]:
    """Return the options that a strategy declares to try, each combined with the user's ``own``.

    Those that contradict ``own`` are left out. ``own`` alone, if nothing is left or the strategy
    declares nothing.
    """
    combined: dict[str, Setting] = {}
    for options in declared:
        contradicts = any(own.get(key, value) != value for key, value in options.items())
        if not contradicts:
            merged = {**options, **own}
            combined[setting_key(merged)] = merged
    if combined:
        return list(combined.values())
    return [own] if own else []


def is_same(setting: Setting, config: RunConfig) -> bool:
    """Return True if a strategy's setting is what the resolved ``config`` of
    the job has already.
    """
    there = {
        "strategy": config.strategy,
        "strategy_options": config.strategy_options,
        "nproc": config.nproc,
    }
    return {key: setting[key] for key in there} == there


def _threads(config: RunConfig, environment: Environment) -> Iterator[Setting]:
    """Yield numbers of threads for one rank, where the job runs as one."""
    if environment.threads is None or int(config.nproc) > 1:
        return
    sizes = (environment.cores, max(1, environment.cores // 2))
    yield from ({THREADS: size} for size in dict.fromkeys(sizes) if size != environment.threads)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
