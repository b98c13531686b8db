"""Build the strategy of a config, and read its capabilities. No other module does either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from distcore import registry
from distcore.config import RunConfig, with_changes
from distcore.errors import DistcoreError
from distcore.plugin.options import build
from distcore.plugin.strategy.argument import options_in_argument
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.hooks import capabilities_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A strategy as a run uses it."""

    name: str
    """The name of its entry point, or ``file.py:Class``."""
    options: Mapping[str, Any]
    """Its options, those of ``NAME:VALUE`` included."""
    plugin: object
    """The strategy itself."""
    capabilities: Capabilities
    """Its capabilities."""


def load_strategy(config: RunConfig) -> Strategy:
    """Import the strategy that a config names, and build it from its options;
    raises DistcoreError, one line.
    """
    name, options = options_in_argument(config)
    return load(name, options)


def load(name: str, options: Mapping[str, Any]) -> Strategy:
    """Import the strategy ``name``, and build it from ``options``;
    raises StrategyError, one line.
    """
    cls = registry.load("strategies", name)
    plugin = build("strategy", name, cls, options)
    return bind(name, plugin, options)


def bind(name: str, plugin: object, options: Mapping[str, Any] = MappingProxyType({})) -> Strategy:
    """Return a built strategy together with its capabilities; raises StrategyError
    if it has none.
    """
    return Strategy(
        name=name, options=options, plugin=plugin, capabilities=capabilities_of(name, plugin)
    )


def expanded(config: RunConfig) -> RunConfig:
    """Return ``config`` with a strategy ``NAME:VALUE`` replaced by NAME and the options;
    without a colon, unchanged.

    Raises DistcoreError, one line, if the strategy takes no such value or
    ``strategy_options`` has another one.
    """
    if ":" not in config.strategy:
        return config
    name, options = options_in_argument(config)
    return with_changes(config, {"strategy": name, "strategy_options": options})


def load_installed() -> Iterator[Strategy]:
    """Yield every installed strategy that can be built, with its default options.

    Imports all strategies, which is too slow for anything but error messages and tables.
    """
    for name in registry.offers("strategies"):
        try:
            yield load(name, {})
        except DistcoreError:
            continue


def names_that(can: Callable[[Capabilities], bool]) -> str:
    """Return the names of the installed strategies whose capabilities satisfy ``can``,
    for an error message.
    """
    names = [strategy.name for strategy in load_installed() if can(strategy.capabilities)]
    return ", ".join(names) or "no installed strategy"
