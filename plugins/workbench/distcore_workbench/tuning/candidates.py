"""The candidates of a tune: strategies with the options that they declare, and
fallbacks that save memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from distcore import DistcoreError, Memory, RunConfig, load_config
from distcore.cli import JobRequest
from distcore.lab import resolve, strategies
from distcore.registry import offers
from distcore_workbench.compare.comparison_rows import parse_rows
from distcore_workbench.tuning import fallbacks, settings
from distcore_workbench.tuning.limits import needed_bytes, planned_memory
from distcore_workbench.tuning.settings import (
    Environment,
    Family,
    Setting,
    setting_key,
    with_setting,
)

log = logging.getLogger("distcore")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest(JobRequest):
    """A job to tune: the flags of ``distcore tune``."""

    budget: float
    """Minutes for all trials."""
    strategies: str
    """Strategies to try in addition to the job's own, as for ``--strategy``, separated
    by commas; empty: all.
    """
    fit_only: bool
    """Look for a setting that fits into memory, not for the fastest."""
    json: bool
    """Print JSON instead of tables."""
    out: str | None
    """The folder to write to; ``None``: a new one under runs/."""


def requested_strategies(request: TuneRequest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and options of the strategies to try. Raises DistcoreError, one line, for a bad
    name of the user's.
    """
    if not request.strategies:
        for name in offers("strategies"):
            yield name, {}
        return
    for text in parse_rows(request.strategies, ()):
        strategy = strategies.load_strategy(load_config(None, {"strategy": text}))
        yield strategy.name, strategy.options


def families_of(
    request: TuneRequest,
    named: Sequence[tuple[str, Mapping[str, Any]]],
    base: RunConfig,
    resolved: RunConfig,
    meta_model: nn.Module | None,
    environment: Environment,
) -> Iterator[Family]:
    """Yield the settings of each requested strategy, sorted by traffic: the least
    first, unknown traffic last.
    """
    by_traffic: list[tuple[float, Family]] = []
    for name, options in named:
        try:
            strategy = strategies.load(name, options)
        except DistcoreError as error:
            log.warning("strategy %s is not tried: %s", name, error)
            continue
        one = strategy.capabilities.processes == "one"
        tried = settings.options_tried(getattr(type(strategy.plugin), "tunes", ({},)), options)
        family = settings.strategy_settings(base, name, one, tried, environment.ranks)
        known = {setting_key(setting): _memory(request, setting, meta_model) for setting in family}
        family = [
            setting
            for setting in family
            if (options or _is_worth(known[setting_key(setting)]))
            and not settings.is_same(setting, resolved)
        ]
        if request.strategies and not one and environment.ranks == 1:
            log.warning(
                "strategy %s is not tried: there is one rank here; --nproc starts more", name
            )
        if family and (one or environment.ranks > 1):
            first, _ = known[setting_key(family[0])] or (None, "")
            sends = (
                math.inf if first is None or first.sent is None else first.sent + first.sent_each
            )
            by_traffic.append((sends, family))
    yield from (family for _, family in sorted(by_traffic, key=lambda pair: pair[0]))


def _memory(
    request: TuneRequest, setting: Setting, meta_model: nn.Module | None
) -> tuple[Memory, str] | None:
    """Return the memory that a setting needs, and its device; ``None`` if unknown."""
    if meta_model is None:
        return None
    try:
        resolved = resolve(with_setting(request.config, request.changes, setting))
    except DistcoreError:
        return None  # its trial says why
    memory = planned_memory(resolved, meta_model)
    return (memory, resolved.config.device) if memory else None


def _is_worth(known: tuple[Memory, str] | None) -> bool:
    """Return False for offload to main memory on ranks that compute in main memory anyway."""
    return known is None or not (known[0].host and known[1] == "cpu")


def fallbacks_of(
    request: TuneRequest, meta_model: nn.Module | None, families: Sequence[Family]
) -> list[Setting]:
    """Return the fallbacks: the job as given, then options that save memory, then
    strategies, the largest first.
    """
    needs = {setting_key(one): _memory(request, one, meta_model) for one in ({}, *chain(*families))}
    own = needs[setting_key({})]
    if own is None:
        return fallbacks.fallback_settings([])
    known = {key: needed_bytes(*one) for key, one in needs.items() if one}
    sizes = {key: size for key, size in known.items() if size < needed_bytes(*own)}
    frugal = [one for one in chain(*families) if setting_key(one) in sizes]
    return fallbacks.fallback_settings(sorted(frugal, key=lambda one: -sizes[setting_key(one)]))
