"""The settings of a job that keep its mathematics, and the values that are worth a
trial on this machine.
"""

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
"""The one entry of a setting that is no config key: OMP_NUM_THREADS of the ranks, ``None`` for a
share of the cores.
"""
Family = Sequence[Setting]
"""Settings of one kind, the fastest first as far as is known: if that one is far behind, the
others are left out.
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
    own = [
        value for key, value in setting.items() if key != "strategy_options" and value is not None
    ]
    return len(own) + len(setting.get("strategy_options", {}))


def name_of(setting: Setting) -> str:
    """Return a setting as the table shows it: ``NAME bucket_mb=5 nproc=2``, or ``as given``."""
    words = [str(setting["strategy"])] if "strategy" in setting else []
    words += [
        f"{name}={_text(value)}" for name, value in setting.get("strategy_options", {}).items()
    ]
    skipped = ("strategy", "strategy_options")
    words += [f"{key.rpartition('.')[2]}={_text(value)}" for key, value in setting.items()
              if key not in skipped and value is not None]  # fmt: skip
    return " ".join(words) or "as given"


def with_setting(file: str | None, changes: Mapping[str, Any], setting: Setting) -> RunConfig:
    """Return the config of the job with a setting, not resolved; arguments as
    for ``load_config``, which raises.
    """
    own = {key: value for key, value in setting.items() if key != THREADS}
    # they replace what the file and the flags say of another strategy
    if "strategy_options" in own:
        changes = {
            key: value for key, value in changes.items() if not key.startswith("strategy_options")
        }
    return load_config(file, dict(changes) | own)


def axes(
    base: RunConfig, resolved: RunConfig, environment: Environment, strategies: Sequence[Family]
) -> list[Axis]:
    """Return the axes in the order in which they are tried: the one with most effect first.

    ``base`` is the config as given, ``resolved`` the same with every 'auto' replaced,
    ``strategies`` the strategies to
    try, each with its options, the one with the least traffic first. Those behind the first
    ``FIRST`` come late: each starts ranks for its trial, and is seldom faster where those are not.
    """
    modes = [mode for mode in ("regions", "on") if environment.compiles and mode != base.compile]
    every = [
        Axis(
            "strategy, ranks and threads",
            [*([one] for one in _threads(resolved, environment)), *strategies[:FIRST]],
        ),
        Axis("ranks", [[{"nproc": ranks}] for ranks in _powers(environment.ranks) if ranks > 1]),
        Axis("padding", [[one] for one in environment.forms]),
        Axis(
            "micro-batch",
            [[one] for one in micro_batches(resolved)],
            partial(_shares_rows, resolved),
        ),
        Axis("compile", [[{"compile": mode}] for mode in modes]),
        Axis(
            "loader",
            [[{"loader.workers": workers}] for workers in (1, 2) if workers != base.loader.workers],
        ),
        Axis("other strategies", strategies[FIRST:], partial(_shares_rows, resolved)),
        Axis("recomputation", [[{"gradient_checkpointing": not base.gradient_checkpointing}]]),
    ]
    return [axis for axis in every if axis.families]


def micro_batches(config: RunConfig) -> list[Setting]:
    """Return other ways to cut a step of a resolved config: by other bounds, and as one
    micro-batch of each rank.
    """
    rows = config.global_batch_size // int(config.nproc)
    by_rows: list[Setting] = [
        {"micro_batch_size": size, "micro_batch_tokens": None}
        for size in (rows, rows // 2, rows // 4)
        if size and rows % size == 0 and size != config.micro_batch_size
    ]
    cost, tokens = config.loader.forward_tokens, config.micro_batch_tokens
    if tokens is None:
        return [{"micro_batch_size": "auto"}, *by_rows]
    costs = [max(1, int(cost) // 4), 4 * int(cost)] if cost != "auto" else []
    by_tokens: list[Setting] = [
        {"micro_batch_tokens": 2 * tokens},
        {"micro_batch_tokens": tokens // 4},
    ]
    return (
        [*({"loader.forward_tokens": one} for one in costs), by_rows[0], *by_tokens]
        if by_rows
        else by_tokens
    )


def _shares_rows(config: RunConfig, setting: Setting) -> bool:
    """Return True if the ranks of the setting share the rows of a step in
    micro-batches of its size.
    """
    size = setting.get("micro_batch_size")
    return (
        not isinstance(size, int)
        or config.global_batch_size % (size * setting.get("nproc", int(config.nproc))) == 0
    )


def strategy_settings(
    base: RunConfig, name: str, one_process: bool, options: Sequence[Setting], ranks: int
) -> Family:
    """Return the settings of a strategy: each of the ``options`` that it declares, under
    the user's own ones.
    """
    own = strategies.expanded(base)
    mine = own.strategy_options if own.strategy == name else {}
    many = {"nproc": 1 if one_process else ranks, THREADS: None}
    return [{"strategy": name, "strategy_options": {**mine, **one}, **many} for one in options]


def options_tried(declared: Sequence[Setting], own: Setting) -> list[Setting]:
    """Return the options that a strategy declares to try, combined with the
    user's ``own``, without contradictions.

    ``own`` alone, if nothing is left or the strategy declares nothing.
    """
    agreeing = [
        one for one in declared if all(own.get(key, value) == value for key, value in one.items())
    ]
    distinct = {setting_key(one): one for one in ({**one, **own} for one in agreeing)}
    return list(distinct.values()) or ([own] if own else [])


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
