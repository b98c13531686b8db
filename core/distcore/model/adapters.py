"""The adapter of a run, which a plugin implements: its keys are ``lora`` in a config."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore import registry
from distcore.config import LoRA, RunConfig
from distcore.distributed import dtensors
from distcore.errors import ConfigError, MetaModelError, StrategyError
from distcore.plugin.adapter import Adapter, Origin
from distcore.plugin.strategy.contract import LocalRange, ModelSource, WeightStream

log = logging.getLogger("distcore")


def adapter_of(config: RunConfig) -> Adapter:
    """Return the adapter of a run that has one; raises ConfigError, with what to install."""
    try:
        adapter: Adapter = registry.load("adapters", "lora")
    except StrategyError as error:
        raise ConfigError(f"lora.rank = {config.lora.rank}: {error}") from None
    return adapter


def resolved(config: RunConfig) -> Mapping[str, Any]:
    """Return the values that fill in the adapter's keys, by dotted key.

    Raises ConfigError if the adapter cannot be used.
    """
    lora = config.lora
    if lora.rank is not None:
        return adapter_of(config).resolve(config)
    if changed := sorted(name for name, value in lora if value != getattr(LoRA(), name)):
        value = getattr(lora, changed[0])
        raise ConfigError(
            f"lora.{changed[0]} = {value!r}: does nothing without a rank; give --set lora.rank=8"
        )
    return {}


def adapted(config: RunConfig, base: ModelSource, is_known_by_values: bool) -> ModelSource:
    """Return how to build the model of ``base`` with the run's adapter.

    A base that is known by the digest of its values is always built whole.
    """
    adapter = adapter_of(config)

    def inject(module: nn.Module) -> Mapping[str, Origin]:
        return adapter.inject(config, module, base.folder)

    def build_adapted(build: Callable[[], nn.Module]) -> nn.Module:
        module = build()
        inject(module)
        return module

    replay = None
    if base.replay is not None and not is_known_by_values:
        replay = partial(_replay, base.replay, inject)

    def build() -> nn.Module:
        # Read in parts where that is possible, so that no base is ever wider than it stays.
        if replay and base.folder and config.lora.base != "fp32":
            try:
                module, values = replay()
            except MetaModelError as reason:
                log.info("lora: the base is in fp32 while it is loaded: %s", reason)
            else:
                dtensors.allocate(module, torch.device("cpu"))
                dtensors.replay(module, values)
                return module
        return build_adapted(base.build)

    return ModelSource(
        build=build, meta_model=partial(build_adapted, base.meta_model), replay=replay
    )


def _replay(
    replay_base: Callable[[], tuple[nn.Module, WeightStream]],
    inject: Callable[[nn.Module], Mapping[str, Origin]],
) -> tuple[nn.Module, WeightStream]:
    """Return the meta model of ``replay_base`` with an adapter, and a stream of all its values."""
    model, base_values = replay_base()
    base_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    origins = inject(model)
    parameters = dict(model.named_parameters())
    # The adapter's own parameters have no origin in the base.
    adapter_values = {
        name: value.detach().clone() for name, value in parameters.items() if name not in origins
    }
    users: dict[str, list[str]] = defaultdict(list)
    """The parameters that start with the values of a base's: itself, and perhaps a trained copy."""
    for name, origin in origins.items():
        users[origin.name].append(name)

    def values(wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        def made_of(name: str) -> tuple[int, int]:
            """Return the range of base elements from which the wanted range is computed."""
            start, count = wanted(name)
            if origins[name].make is None or not count:
                return start, count
            # A made parameter is computed row by row, from whole rows of the base.
            width = parameters[name].shape[1]
            base_width = base_shapes[origins[name].name][1]
            first, stop = start // width, -(-(start + count) // width)
            return first * base_width, (stop - first) * base_width

        def covering(name: str) -> tuple[int, int]:
            """Return the range of base elements that has those of all users of a parameter."""
            ranges = [(start, start + count) for start, count in map(made_of, users[name]) if count]
            first = min((start for start, _ in ranges), default=0)
            last = max((stop for _, stop in ranges), default=first)
            return first, last - first

        for read_name, read in base_values(covering):
            first_read, _ = covering(read_name)
            for name in users[read_name]:
                start, count = made_of(name)
                values = read[start - first_read :][:count]
                make = origins[name].make
                if make and count:
                    rows = make(values.view(-1, base_shapes[read_name][1]))
                    wanted_start, wanted_count = wanted(name)
                    offset = wanted_start % parameters[name].shape[1]
                    values = rows.view(-1)[offset:][:wanted_count]
                    del rows
                yield name, values
                del values
            del read  # before the next one is read
        for name, value in adapter_values.items():
            start, count = wanted(name)
            yield name, value.reshape(-1)[start : start + count]

    return model, values
