"""The adapter of a run, which a plugin implements: its keys are ``lora`` in a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distcore import registry
from distcore.config import LoRA, RunConfig
from distcore.errors import ConfigError, StrategyError
from distcore.plugin.adapter import Adapter


def adapter_of(config: RunConfig) -> Adapter:
    """Return the adapter of a run that has one; raises ConfigError, with what to install, if that is missing."""
    try:
        adapter: Adapter = registry.load("adapters", "lora")
    except StrategyError as error:
        raise ConfigError(f"lora.rank = {config.lora.rank}: {error}") from None
    return adapter


def resolved(config: RunConfig) -> Mapping[str, Any]:
    """Return the values that fill in the adapter's keys, by dotted key; raises ConfigError if it cannot be used."""
    lora = config.lora
    if lora.rank is not None:
        return adapter_of(config).resolve(config)
    if changed := sorted(name for name, value in lora if value != getattr(LoRA(), name)):
        value = getattr(lora, changed[0])
        raise ConfigError(f"lora.{changed[0]} = {value!r}: does nothing without a rank; give --set lora.rank=NAME")
    return {}
