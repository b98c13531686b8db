"""Messages to a user about the options of a plugin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from strategy_chain import is_offered

from distcore import registry
from distcore.plugin.options import options_of


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
