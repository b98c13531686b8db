"""The values of ``--sweep``: lists, whose combinations all run, and ranges to draw trials from."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distcore import ConfigError
from distcore.cli import canonical, parse_values
from distcore_workbench.compare.comparison_rows import folder_name

NOT_SWEPT = ("out", "overwrite", "resume", "resume_changed")
"""Keys that every run of a sweep gets from the sweep."""
_NUMBER = r"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}?)\.\.({_NUMBER})(\s+log)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """All numbers from ``low`` to ``high``, both included; two integers
    make a range of integers.
    """

    low: float
    """The least."""
    high: float
    """The largest."""
    log: bool
    """Whether the logarithm is drawn evenly."""

    @property
    def is_whole(self) -> bool:
        """True for a range of integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{' log' * self.log}"


Axes = Mapping[str, Range | list[Any]]
"""By config key, what it may be."""


def axes_of(sweeps: Sequence[str], changes: Mapping[str, Any]) -> Axes:
    """Return what each key may be.

    ``sweeps``: values of ``--sweep``; ``changes``: what else is set.

    Raises ConfigError for a key that cannot be swept or is set otherwise too, and for a range
    without numbers in it.
    """
    axes: dict[str, Range | list[Any]] = {}
    for text in sweeps:
        key, _, listed = text.partition("=")
        if not key or not listed:
            raise ConfigError(
                f"--sweep {text}: expected KEY=VALUE,VALUE, such as --sweep lr=1e-4,3e-4"
            )
        if key in NOT_SWEPT:
            raise ConfigError(
                f"--sweep {text}: each run of a sweep has its own {key}; choose another key"
            )
        if canonical(key) in map(canonical, (*axes, *changes)):
            raise ConfigError(f"--sweep {text}: {key} is set twice; keep one of them")
        axes[key] = _range(text, listed) or parse_values(listed)
    for key in ("resume", "overwrite"):
        if key in changes:
            raise ConfigError(
                f"--sweep: goes on by itself with the runs that are not finished; leave out --{key}"
            )
    return axes


def _range(text: str, listed: str) -> Range | None:
    """Return the range ``LOW..HIGH``, of whole numbers if both ends are; ``None``: it is a list."""
    match = _RANGE.fullmatch(listed.strip())
    if match is None:
        return None
    ends_as_text = match.group(1, 2)
    is_whole = all(end.lstrip("+-").isdigit() for end in ends_as_text)
    number = int if is_whole else float
    try:
        low, high = map(number, ends_as_text)
    except ValueError:
        raise ConfigError(f"--sweep {text}: expected LOW..HIGH, such as lr=1e-5..1e-3") from None
    if low >= high:
        raise ConfigError(f"--sweep {text}: {low} is not below {high}")
    if match[3] and low <= 0:
        raise ConfigError(f"--sweep {text}: a range with log begins above 0")
    return Range(low=low, high=high, log=bool(match[3]))


def combinations(axes: Axes) -> dict[str, dict[str, Any]]:
    """Return the settings of each run by its name: all combinations, the last key changing fastest.

    Raises ConfigError for a range, which has no end of values, and for a value that is there twice.
    """
    lists = {}
    for key, axis in axes.items():
        if isinstance(axis, Range):
            raise ConfigError(
                f"--sweep {key}={axis}: say how many of these values to try, with --trials N"
            )
        lists[key] = axis
    rows: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*lists.values()):
        settings = dict(zip(lists, values, strict=True))
        if name_of(settings) in rows:
            raise ConfigError(f"--sweep: {name_of(settings)} is there twice; name each value once")
        rows[name_of(settings)] = settings
    return rows


def ends(axes: Axes) -> dict[str, dict[str, Any]]:
    """Return settings, by name, that together have every listed value and every range's ends."""
    values_by_key: dict[str, list[Any]] = {}
    for key, axis in axes.items():
        values_by_key[key] = [axis.low, axis.high] if isinstance(axis, Range) else axis
    first = {key: values[0] for key, values in values_by_key.items()}
    rows = [first]
    # One key at a time: all combinations would be checked one by one, before any run.
    for key, values in values_by_key.items():
        rows += [first | {key: value} for value in values[1:]]
    return {name_of(row): row for row in rows}


def name_of(settings: Mapping[str, Any]) -> str:
    """Return the name of a run with these settings, which is also that of its folder."""
    return folder_name(",".join(f"{key}={text_of(value)}" for key, value in settings.items()))


def text_of(value: object) -> str:
    """Return a value as text: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
