"""What ``exact`` takes, decided before any rank starts: all else is refused in one line."""

from __future__ import annotations

from typing import Any

from distcore.config import RunConfig
from distcore.errors import ConfigError
from distcore.model.optim import is_plugin, optimizer_class
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.resolve.strategies import names_that

THREADS = 1
"""Computing threads of a rank unless ``threads`` is set."""


def exact_values(config: RunConfig) -> dict[str, Any]:
    """Return the values that ``exact`` decides; raises ConfigError for ``threads`` without it."""
    if config.exact is not None:
        return {"threads": config.threads or THREADS}
    if config.threads is not None:
        raise ConfigError(
            f"threads = {config.threads}: is part of the arithmetic of --exact; leave it out, or"
            f" set OMP_NUM_THREADS={config.threads} in the environment"
        )
    return {}


def check_exact(config: RunConfig, declared: Capabilities) -> None:
    """Raise ConfigError, one line, for a training that cannot keep the bits of ``exact``.

    Device, precision and number of ranks are known.
    """
    if config.exact is None:
        return
    for why_not in (
        _of_strategy(config, declared),
        _of_ranks(config),
        _of_arithmetic(config),
        _of_optimizer(config, declared),
    ):
        if why_not:
            raise ConfigError(f"exact = {config.exact}: {why_not}")


def _of_strategy(config: RunConfig, declared: Capabilities) -> str:
    """Return why the strategy does not keep the bits; empty if it does."""
    if declared.keeps_bits(config.precision):
        return ""
    able = names_that(lambda other: other.keeps_bits(config.precision))
    return (
        f"strategy {config.strategy!r} with these options does not keep the same bits in"
        f" {config.precision}; {able} could, with their default options"
    )


def _of_ranks(config: RunConfig) -> str:
    """Return why there are too many ranks; empty if there are not."""
    blocks, ranks = int(config.exact or 0), int(config.nproc)
    if ranks <= blocks:
        return ""
    return (
        f"a step of {blocks} blocks has work for as many ranks, and --nproc is {ranks}; a new run"
        f" may have --exact {ranks}, which are other bits"
    )


def _of_arithmetic(config: RunConfig) -> str:
    """Return what the device or a compiler adds up in an order of its own; empty if nothing is."""
    if config.device != "cpu":
        return (
            f"was measured on CPUs only, and the device is {config.device!r}; use --device cpu, or"
            " --deterministic, which repeats a run at one number of ranks"
        )
    if config.compile != "off":
        return f"compiled code (--compile {config.compile}) was not measured; use --compile off"
    return ""


def _of_optimizer(config: RunConfig, declared: Capabilities) -> str:
    """Return why the optimizer steps shards otherwise than wholes; empty if it does not."""
    name = config.optimizer.name
    if not is_plugin(name):
        return (
            f"the optimizer {name!r} is strategy {config.strategy!r}'s own, which was not measured;"
            " use adamw, adam or sgd"
        )
    if not declared.shards_parameters or optimizer_class(name).elementwise:
        return ""
    return (
        f"strategy {config.strategy!r} steps shards, and the optimizer {name!r} does not step each"
        " element by itself; use adamw, adam or sgd"
    )
