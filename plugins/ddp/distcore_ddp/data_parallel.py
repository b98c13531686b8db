"""``dp``: torch's DataParallel, one process that splits each micro-batch over all
GPUs of the machine.
"""

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
    """Run one process that copies the model to every GPU in each forward pass. On a CPU,
    train as one process.
    """

    tunes: ClassVar = ()  # distcore tune leaves dp out: one process per device is always faster

    capabilities: ClassVar = Capabilities(
        spec_version=3,
        processes="one",
        devices=frozenset({"cpu", "cuda"}),
        other_optimizers="all",
        phases=True,
        own_steps=True,
        ema=True,
        why_not_compiled=(
            "copies modules to other GPUs, but compiled code works on the first GPU only"
        ),
        collectives_per_step=0,
        limits=("on a CPU it trains as one plain process",),
    )

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of the whole model, which the first device holds."""
        return footprint.whole(meta_model, make_optimizer)

    def traced(self) -> object:
        """Return itself: ``distcore plan`` traces the whole batch on one device, an upper
        bound for several GPUs.
        """
        return self

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Return a world of one rank."""
        return World(rank=0, size=1, local_rank=0, device=device_of(config, rank_info))

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Wrap the model in DataParallel over all GPUs. On a CPU, leave the model unwrapped."""
        model = model.to(run.world.device)
        optimizer = make_optimizer(model) if make_optimizer else None
        wrapped = model if run.world.device.type == "cpu" else nn.DataParallel(model)
        return PreparedModel(model=wrapped, optimizer=optimizer)
