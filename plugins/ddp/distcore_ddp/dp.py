"""``dp``: torch's DataParallel, one process that spreads each micro-batch over all GPUs of the machine."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from distcore import Capabilities, OptimizerFactory, PreparedModel, RankInfo, Run, RunConfig, World, device_of, hookimpl


class DataParallelStrategy:
    """One process, one copy of the model a GPU for the time of a forward pass. On a CPU it is one plain process."""

    capabilities: ClassVar = Capabilities(
        spec_version=2,
        processes="one",
        collectives_per_step=0,
        limits=("on a CPU there is nothing to spread over: it trains as one process",),
    )

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        return World(rank=0, size=1, local_rank=0, device=device_of(config, rank_info))

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        model = model.to(run.world.device)
        gpus = list(range(torch.cuda.device_count())) if run.world.device.type == "cuda" else None
        optimizer = make_optimizer(model) if make_optimizer else None
        return PreparedModel(model=nn.DataParallel(model, device_ids=gpus), optimizer=optimizer)
