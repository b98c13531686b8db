"""Messages to a user about the options of a plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import BeforeValidator
from strategy_chain import is_offered

from distcore import StrategyError, registry
from distcore.plugin.options import build, options_of


@dataclass(frozen=True, kw_only=True)
class Base:
    width: int = 1
    """How wide it is."""
    depth: int = 2
    """How deep it is."""


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    depth: int = 3
    """How deep it really is."""
    height: float = 0.5
    """How high it is."""


def test_options_of_a_class_that_extends_another_are_documented_in_either() -> None:
    assert [(option.name, option.default, option.doc) for option in options_of(Derived)] == [
        ("width", "1", "How wide it is."),
        ("depth", "3", "How deep it really is."),
        ("height", "0.5", "How high it is."),
    ]


@pytest.mark.parametrize("name", [name for name in registry.entries("strategies") if is_offered(name)])
def test_every_option_of_a_strategy_is_documented(name: str) -> None:
    assert not [option.name for option in options_of(registry.load("strategies", name)) if not option.doc]


def as_a_word(given: object) -> object:
    return {True: "on", False: "off"}[given] if isinstance(given, bool) else given


@dataclass(frozen=True, kw_only=True)
class Switched:
    kept: Annotated[Literal["auto", "on", "off"], BeforeValidator(as_a_word)] = "auto"
    count: int = 1


def test_on_and_off_are_values_of_an_option_that_has_them_though_yaml_reads_truth_values() -> None:
    assert [build("task", "mine", Switched, {"kept": given}).kept for given in (True, False)] == ["on", "off"]
    with pytest.raises(StrategyError, match="count = True: expected neither true nor false"):
        build("task", "mine", Switched, {"count": True})
