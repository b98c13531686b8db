"""What a tune may try: the strategies asked for, with what they declare, and the ladder of what spares memory."""

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
from distcore.jobs import offers, resolve, strategies
from distcore_workbench.compare.rows import parse_rows
from distcore_workbench.tuning import ladder, settings
from distcore_workbench.tuning.limits import needed, planned
from distcore_workbench.tuning.settings import Family, Place, Setting, key_of, with_setting

log = logging.getLogger("distcore")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(JobRequest):
    """What to tune: the flags of ``distcore tune``."""

    budget: float
    """Minutes for all trials."""
    strategies: str
    """Strategies to try beside the job as given, as ``--strategy`` takes them, separated by commas; empty: all."""
    fit_only: bool
    """Look for a setting that fits into memory, not for the fastest."""
    json: bool
    """Print JSON instead of tables."""
    out: str | None
    """The folder to write to; ``None``: a new one under runs/."""


def asked(request: Request) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and options of the strategies to try; raises DistcoreError, one line, for one that the user names."""
    if not request.strategies:
        for name in offers("strategies"):
            yield name, {}
        return
    for text in parse_rows(request.strategies, ()):
        strategy = strategies.of(load_config(None, {"strategy": text}))
        yield strategy.name, strategy.options


def families_of(
    request: Request,
    named: Sequence[tuple[str, Mapping[str, Any]]],
    base: RunConfig,
    resolved: RunConfig,
    skeleton: nn.Module | None,
    place: Place,
) -> Iterator[Family]:
    """Yield the settings of each strategy that is asked for, by what it sends: least first, unknown last."""
    found: list[tuple[float, Family]] = []
    for name, options in named:
        try:
            strategy = strategies.named(name, options)
        except DistcoreError as error:
            log.warning("strategy %s is not tried: %s", name, error)
            continue
        one = strategy.capabilities.processes == "one"
        tried = settings.options_tried(getattr(type(strategy.plugin), "tunes", ({},)), options)
        family = settings.strategy_settings(base, name, one, tried, place.ranks)
        known = {key_of(setting): _memory(request, setting, skeleton) for setting in family}
        family = [
            setting for setting in family
            if (options or _is_worth(known[key_of(setting)])) and not settings.is_same(setting, resolved)
        ]  # fmt: skip
        if request.strategies and not one and place.ranks == 1:
            log.warning("strategy %s is not tried: there is one rank here; --nproc starts more", name)
        if family and (one or place.ranks > 1):
            first, _ = known[key_of(family[0])] or (None, "")
            sends = math.inf if first is None or first.sent is None else first.sent + first.sent_each
            found.append((sends, family))
    yield from (family for _, family in sorted(found, key=lambda pair: pair[0]))


def _memory(request: Request, setting: Setting, skeleton: nn.Module | None) -> tuple[Memory, str] | None:
    """Return what a setting needs, and its device; ``None`` if that is not known."""
    if skeleton is None:
        return None
    try:
        resolved = resolve(with_setting(request.config, request.changes, setting))
    except DistcoreError:
        return None  # its trial says why
    memory = planned(resolved, skeleton)
    return (memory, resolved.config.device) if memory else None


def _is_worth(known: tuple[Memory, str] | None) -> bool:
    """Return False for offload to main memory where that is what the ranks compute in."""
    return known is None or not (known[0].host and known[1] == "cpu")


def rungs_of(request: Request, skeleton: nn.Module | None, families: Sequence[Family]) -> list[Setting]:
    """Return the ladder: the job as given, then what spares memory, then strategies by what they need, most first."""
    needs = {key_of(one): _memory(request, one, skeleton) for one in ({}, *chain(*families))}
    own = needs[key_of({})]
    if own is None:
        return ladder.rungs([])
    sizes = {key: needed(*known) for key, known in needs.items() if known and needed(*known) < needed(*own)}
    frugal = [one for one in chain(*families) if key_of(one) in sizes]
    return ladder.rungs(sorted(frugal, key=lambda one: -sizes[key_of(one)]))
