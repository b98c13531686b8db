"""``--strategy NAME:VALUE``, short for NAME with one option set; the
strategy declares which option.

``NAME:OPTION=VALUE,OPTION=VALUE`` sets options of any strategy by their names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from distcore import registry
from distcore.config import RunConfig, parse_value
from distcore.errors import ConfigError, StrategyError


def options_in_argument(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of the strategy, and all its options: those of ``NAME:VALUE`` and
    those of the config.

    Raises DistcoreError, one line, if the strategy takes no such value or
    ``strategy_options`` has another one.
    """
    name, colon, text = config.strategy.partition(":")
    if not colon:
        return name, config.strategy_options
    options = (
        _named(config.strategy, text) if "=" in text else _declared(config.strategy, name, text)
    )
    for option, value in options.items():
        said = config.strategy_options.get(option, value)
        if said != value:
            raise ConfigError(
                f"strategy = {config.strategy!r}: strategy_options.{option} = {said!r} says"
                " otherwise; leave one out"
            )
    return name, config.strategy_options | options


def _named(asked: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in text.split(","):
        option, equals, value = part.strip().partition("=")
        if not (option and equals and value) or option in options:
            raise ConfigError(
                f"strategy = {asked!r}: expected OPTION=VALUE,OPTION=VALUE after the colon, not"
                f" {part!r}"
            )
        options[option] = parse_value(value)
    return options


def _declared(asked: str, name: str, text: str) -> dict[str, Any]:
    option = _option_of(asked, name)
    if not text:
        raise ConfigError(f"strategy = {asked!r}: expected a value of {option} after the colon")
    return {option: parse_value(text)}


def shorthand_of(name: str, cls: type[object]) -> str | None:
    """Return the option that VALUE sets, ``None`` if the strategy declares none.

    ``name`` is the strategy's name and ``cls`` its class. Raises StrategyError if the class
    has no such option.
    """
    option: str | None = getattr(cls, "shorthand", None)
    fields = (
        [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    )
    if option is not None and option not in fields:
        raise StrategyError(
            f"strategy {name!r}: declares the shorthand {option!r}, which is none of its options"
        )
    return option


def _option_of(asked: str, name: str) -> str:
    option = shorthand_of(name, registry.load("strategies", name))
    if option is None:
        raise ConfigError(
            f"strategy = {asked!r}: {name!r} takes no value after a colon; use --set"
            " strategy_options.NAME=VALUE"
        )
    return option
