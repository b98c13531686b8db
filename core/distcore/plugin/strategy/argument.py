"""``--strategy NAME:VALUE``, short for NAME with one option set; the strategy declares which.

``NAME:OPTION=VALUE,OPTION=VALUE`` sets options of any strategy by their names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from distcore import registry
from distcore.config import RunConfig, parse_value
from distcore.errors import ConfigError, StrategyError


def options_in_argument(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Return the strategy's name, and all its options: of ``NAME:VALUE`` and of the config.

    Raises DistcoreError, one line, if the strategy takes no such value or ``strategy_options`` has
    another one.
    """
    name, colon, text = config.strategy.partition(":")
    if not colon:
        return name, config.strategy_options
    if "=" in text:
        options = _named(config.strategy, text)
    else:
        options = _declared(config.strategy, name, text)
    for option, value in options.items():
        configured = config.strategy_options.get(option, value)
        if configured != value:
            raise ConfigError(
                f"strategy = {config.strategy!r}: strategy_options.{option} = {configured!r} says"
                " otherwise; leave one out"
            )
    return name, config.strategy_options | options


def _named(argument: str, text: str) -> dict[str, Any]:
    """Return the options of ``OPTION=VALUE,OPTION=VALUE``, after the colon."""
    options: dict[str, Any] = {}
    for part in text.split(","):
        option, equals, value = part.strip().partition("=")
        if not (option and equals and value) or option in options:
            raise ConfigError(
                f"strategy = {argument!r}: expected OPTION=VALUE,OPTION=VALUE after the colon, not"
                f" {part!r}"
            )
        options[option] = parse_value(value)
    return options


def _declared(argument: str, name: str, text: str) -> dict[str, Any]:
    """Return the option that the strategy declares for a value alone."""
    option = _option_of(argument, name)
    if not text:
        raise ConfigError(f"strategy = {argument!r}: expected a value of {option} after the colon")
    return {option: parse_value(text)}


def shorthand_of(name: str, cls: type[object]) -> str | None:
    """Return the option that VALUE sets, ``None`` if the strategy declares none.

    ``name`` is the strategy's name and ``cls`` its class. Raises StrategyError if the class
    has no such option.
    """
    option: str | None = getattr(cls, "shorthand", None)
    fields = []
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls)]
    if option is not None and option not in fields:
        raise StrategyError(
            f"strategy {name!r}: declares the shorthand {option!r}, which is none of its options"
        )
    return option


def _option_of(argument: str, name: str) -> str:
    """Return the option that VALUE sets; raises ConfigError if the strategy declares none."""
    option = shorthand_of(name, registry.load("strategies", name))
    if option is None:
        raise ConfigError(
            f"strategy = {argument!r}: {name!r} takes no value after a colon; use --set"
            " strategy_options.NAME=VALUE"
        )
    return option
