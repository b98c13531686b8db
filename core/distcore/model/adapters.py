"""The adapter of a run, which a plugin implements. Its keys are those of ``lora`` in a config."""

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
from distcore.rounding import ceil_div

log = logging.getLogger("distcore")


def adapter_of(config: RunConfig) -> Adapter:
    """Return the adapter of a run that has one.

    Raises ConfigError, which says what to install, if the adapter's plugin is missing.
    """
    try:
        adapter: Adapter = registry.load("adapters", "lora")
    except StrategyError as error:
        raise ConfigError(f"lora.rank = {config.lora.rank}: {error}") from None
    return adapter


def resolved(config: RunConfig) -> Mapping[str, Any]:
    """Return, by dotted key, values for the adapter's keys that may be 'auto'.

    Raises ConfigError if the adapter cannot be used, or if its keys are set without a rank, which
    would have no effect.
    """
    lora = config.lora
    if lora.rank is not None:
        return adapter_of(config).resolve(config)
    defaults = LoRA()
    changed = sorted(name for name, value in lora if value != getattr(defaults, name))
    if changed:
        name = changed[0]
        value = getattr(lora, name)
        raise ConfigError(
            f"lora.{name} = {value!r}: does nothing without a rank; give --set lora.rank=8"
        )
    return {}


def adapted(config: RunConfig, base: ModelSource, is_known_by_values: bool) -> ModelSource:
    """Return how to build the model of ``base`` with the run's adapter.

    ``is_known_by_values``: the base is known by a digest of its values, and not of its files. It
    is then always built whole.
    """
    adapter = adapter_of(config)

    def inject(module: nn.Module) -> Mapping[str, Origin]:
        return adapter.inject(config, module, base.folder)

    def build_adapted(build_base: Callable[[], nn.Module]) -> nn.Module:
        module = build_base()
        inject(module)
        return module

    replay = None
    if base.replay is not None and not is_known_by_values:
        replay = partial(_replay, base.replay, inject)

    def build() -> nn.Module:
        # Read the base in parts where that is possible: built whole it is in fp32 first, and takes
        # more memory than the narrower layers in which it stays.
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
    """Return the meta model of ``replay_base`` with an adapter, and a stream of the values of all
    its parameters.

    The stream reads each parameter of the base once, and only the elements of it that the wanted
    ranges of the adapted model's parameters are made of.
    """
    model, base_values = replay_base()
    base_shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    origins = inject(model)
    parameters = dict(model.named_parameters())
    # The adapter's own parameters have no origin in the base.
    adapter_values = {}
    for name, value in parameters.items():
        if name not in origins:
            adapter_values[name] = value.detach().clone()
    users: dict[str, list[str]] = defaultdict(list)
    """Names of the adapted model's parameters by the name of the base's parameter that they begin
    from: the frozen one, and perhaps a trained copy.
    """
    for name, origin in origins.items():
        users[origin.name].append(name)

    def values(wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        def made_of(name: str) -> tuple[int, int]:
            """Return start and count of the base's elements from which what is wanted of a
            parameter of the adapted model is computed.
            """
            start, count = wanted(name)
            if origins[name].make is None or not count:
                return start, count
            # A made parameter is computed row by row, from whole rows of the base.
            width = parameters[name].shape[1]
            base_width = base_shapes[origins[name].name][1]
            first_row = start // width
            end_row = ceil_div(start + count, width)
            return first_row * base_width, (end_row - first_row) * base_width

        def covering(base_name: str) -> tuple[int, int]:
            """Return start and count of the elements of a base's parameter that its users need."""
            ranges = [made_of(name) for name in users[base_name]]
            # An empty range has no place, so its start must not count.
            not_empty = [(start, count) for start, count in ranges if count]
            first = min((start for start, _ in not_empty), default=0)
            end = max((start + count for start, count in not_empty), default=first)
            return first, end - first

        for base_name, read in base_values(covering):
            first_read, _ = covering(base_name)
            for name in users[base_name]:
                start, count = made_of(name)
                values = read[start - first_read :][:count]
                make = origins[name].make
                if make and count:
                    rows = make(values.view(-1, base_shapes[base_name][1]))
                    # Whole rows were made; what is wanted may begin and end inside of a row.
                    wanted_start, wanted_count = wanted(name)
                    offset = wanted_start % parameters[name].shape[1]
                    values = rows.view(-1)[offset:][:wanted_count]
                    del rows
                yield name, values
                del values
            # Before the next one is read, so that no two parameters of the base are in memory.
            del read
        for name, value in adapter_values.items():
            start, count = wanted(name)
            yield name, value.reshape(-1)[start : start + count]

    return model, values
