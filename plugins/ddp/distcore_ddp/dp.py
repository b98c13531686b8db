"""``dp``: torch's DataParallel, one process that splits each micro-batch over all GPUs of the machine."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from distcore import (
    Capabilities,
    Memory,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    World,
    device_of,
    footprint,
    hookimpl,
)


class DataParallelStrategy:
    """Run one process, which copies the model to every GPU for each forward pass. On a CPU, train as one process."""

    tunes: ClassVar = ()  # where it could be of use, one process per device is faster

    capabilities: ClassVar = Capabilities(
        spec_version=3,
        processes="one",
        devices=frozenset({"cpu", "cuda"}),
        other_optimizers="all",
        ema=True,
        why_not_compiled="copies modules to other devices, and compiled code stays with the first",
        collectives_per_step=0,
        limits=("on a CPU it trains as one plain process",),
    )

    def plan_memory(
        self, config: RunConfig, skeleton: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the whole of the model, as its first device has it."""
        return footprint.whole(skeleton, make_optimizer)

    def traced(self) -> object:
        """Return itself: a step of one device with all of the batch, of which the first of several has a part."""
        return self

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Return a world of one rank."""
        return World(rank=0, size=1, local_rank=0, device=device_of(config, rank_info))

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        """Wrap the model in DataParallel over all GPUs; on a CPU, leave it as it is."""
        model = model.to(run.world.device)
        optimizer = make_optimizer(model) if make_optimizer else None
        wrapped = model if run.world.device.type == "cpu" else nn.DataParallel(model)
        return PreparedModel(model=wrapped, optimizer=optimizer)
