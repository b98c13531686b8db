"""``single``: one process, one device. The laws compare every other strategy with it."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from distcore.config import RunConfig
from distcore.distributed.devices import device_of
from distcore.plugin.strategy import footprint
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.plugin.strategy.contract import OptimizerFactory, RankInfo, World
from distcore.plugin.strategy.hookspecs import hookimpl
from distcore.plugin.strategy.memory import Memory


class SingleStrategy:
    """Train in one process; every hook except ``setup`` is the core's default."""

    capabilities: ClassVar = Capabilities(
        spec_version=3,
        processes="one",
        other_optimizers="all",
        phases=True,
        own_steps=True,
        ema=True,
        compiles=frozenset({"on", "regions"}),
        exact=frozenset({"fp32", "bf16"}),
        collectives_per_step=0,
    )

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the whole of the model; nothing is sent."""
        return footprint.whole(meta_model, make_optimizer)

    def traced(self) -> object:
        """Return itself: a step sends nothing."""
        return self

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Return a world of one rank, on the configured device."""
        return World(rank=0, size=1, local_rank=0, device=device_of(config, rank_info))
