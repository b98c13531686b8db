"""The candidates of a tune: strategies with their declared options, and fallbacks."""

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
from distcore_workbench.tuning.settings import Environment, Family, Setting, with_setting

log = logging.getLogger("distcore")


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneRequest(JobRequest):
    """A job to tune: the flags of ``distcore tune``."""

    budget: float
    """Minutes for all trials."""
    strategies: str
    """Strategies to try in addition to the job's, as for ``--strategy``, by commas; empty: all."""
    fit_only: bool
    """Look for a setting that fits into memory, not for the fastest."""
    json: bool
    """Print JSON instead of tables."""
    out: str | None
    """The folder to write to; ``None``: a new one under runs/."""


def requested_strategies(request: TuneRequest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and options of the strategies to try.

    Raises DistcoreError, one line, for a bad name of the user's.
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
    """Yield the settings of each requested strategy, those with the least traffic first.

    Unknown traffic is last.
    """
    by_traffic: list[tuple[float, Family]] = []
    for name, options in named:
        try:
            strategy = strategies.load(name, options)
        except DistcoreError as error:
            log.warning("strategy %s is not tried: %s", name, error)
            continue
        is_one_process = strategy.capabilities.processes == "one"
        declared: Sequence[Setting] = getattr(type(strategy.plugin), "tunes", ({},))
        tried = settings.options_tried(declared, options)
        family: list[Setting] = []
        memories: list[tuple[Memory, str] | None] = []
        for setting in settings.strategy_settings(
            base, name, is_one_process, tried, environment.ranks
        ):
            memory = _memory(request, setting, meta_model)
            is_worth_a_trial = bool(options) or _is_worth(memory)
            if is_worth_a_trial and not settings.is_same(setting, resolved):
                family.append(setting)
                memories.append(memory)
        has_ranks = is_one_process or environment.ranks > 1
        if request.strategies and not has_ranks:
            log.warning(
                "strategy %s is not tried: there is one rank here; --nproc starts more", name
            )
        if family and has_ranks:
            by_traffic.append((_traffic(memories[0]), family))
    for _, family_by_traffic in sorted(by_traffic, key=lambda pair: pair[0]):
        yield family_by_traffic


def _traffic(memory_on_device: tuple[Memory, str] | None) -> float:
    """Return the bytes that a rank sends in a step; infinite if they are not known."""
    if memory_on_device is None:
        return math.inf
    memory, _ = memory_on_device
    return math.inf if memory.sent is None else memory.sent + memory.sent_each


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


def _is_worth(memory_on_device: tuple[Memory, str] | None) -> bool:
    """Return False for offload to main memory on ranks that compute in main memory anyway."""
    if memory_on_device is None:
        return True
    memory, device = memory_on_device
    return not (memory.host and device == "cpu")


def fallbacks_of(
    request: TuneRequest, meta_model: nn.Module | None, families: Sequence[Family]
) -> list[Setting]:
    """Return the fallbacks: the job as given, then options that save memory, then strategies.

    Strategies that need less memory than the job's are in it, the largest first.
    """
    memory_of_job = _memory(request, {}, meta_model)
    if memory_of_job is None:
        return fallbacks.fallback_settings([])
    bytes_of_job = needed_bytes(*memory_of_job)
    frugal: list[tuple[int, Setting]] = []
    for setting in chain(*families):
        memory = _memory(request, setting, meta_model)
        if memory is not None and needed_bytes(*memory) < bytes_of_job:
            frugal.append((needed_bytes(*memory), setting))
    frugal.sort(key=lambda pair: -pair[0])
    return fallbacks.fallback_settings([setting for _, setting in frugal])
