"""Messages to a user about the options of a plugin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from strategy_chain import is_offered

from distcore import RunConfig, StrategyError, load_config, registry
from distcore.config.values import parse_settings
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


@pytest.mark.parametrize(
    "name", [name for name in registry.entries("strategies") if is_offered(name)]
)
def test_every_option_of_a_strategy_is_documented(name: str) -> None:
    assert not [
        option.name for option in options_of(registry.load("strategies", name)) if not option.doc
    ]


@dataclass(frozen=True, kw_only=True)
class Switched:
    kept: Literal["auto", "on", "off"] = "auto"
    either: bool | Literal["on"] = "on"
    count: int = 1


def test_on_and_off_are_values_of_an_option_that_has_them_though_yaml_reads_truth_values() -> None:
    assert [build("task", "mine", Switched, {"kept": given}).kept for given in (True, False)] == [
        "on",
        "off",
    ]
    assert build("task", "mine", Switched, {"either": True}).either is True
    with pytest.raises(StrategyError, match="count = True: expected neither true nor false"):
        build("task", "mine", Switched, {"count": True})


def test_on_and_off_are_values_of_each_key_of_a_config_that_has_them(tmp_path: Path) -> None:
    keys = [
        key for key, field in RunConfig.model_fields.items() if "'off'" in str(field.annotation)
    ]
    assert {"prove", "padding_free", "compile"} <= set(keys)
    for word in ("on", "off"):
        file = tmp_path / f"{word}.yaml"
        # without quotes: YAML reads booleans
        file.write_text("".join(f"{key}: {word}\n" for key in keys))
        config = load_config(str(file), {})
        assert [getattr(config, key) for key in keys] == [word] * len(keys)
        changes = parse_settings(f"{key}={word}" for key in keys)
        assert load_config(None, changes) == config
