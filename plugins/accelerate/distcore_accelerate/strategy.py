"""``accelerate``: Hugging Face Accelerate under distcore's loop; its DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from accelerate import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor, nn

from distcore import (
    Capabilities,
    OptimizerFactory,
    Place,
    Run,
    RunConfig,
    World,
    Wrapped,
    gather_rows,
    hookimpl,
    join_process_group,
    leave_process_group,
    sum_over_ranks,
)
from distcore_accelerate import backend
from distcore_accelerate.settings import Backend, Settings, read_settings

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class AccelerateStrategy:
    """Train on a backend of Hugging Face Accelerate, from its config file, its launcher or these options."""

    backend: Backend | None = None
    """Accelerate's way to spread the model: ddp, fsdp2 or deepspeed; default: the config file's, else ddp."""
    config_file: str | None = None
    """YAML or JSON file of ``accelerate config``."""
    split_batches: bool = False
    """Given to Accelerate for loaders of your own; distcore's global batch is always split over ranks."""
    dispatch_batches: bool | None = None
    """Given to Accelerate for loaders of your own; in distcore every rank reads its rows itself."""
    find_unused: bool = False
    """ddp: some parameters take no part in some steps."""
    bucket_mb: int = 25
    """ddp: gradient bucket size in MiB."""

    @cached_property
    def settings(self) -> Settings:
        """What options, config file and launcher ask for together."""
        return read_settings(self)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(collectives_per_step=3 if self.find_unused else 2)

    @hookimpl
    def setup(self, config: RunConfig, place: Place) -> World:
        world = join_process_group(config, place)
        with backend.surroundings(world):
            return backend.world_of(backend.new_accelerator(self.settings, world, self._loading()))

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> Wrapped:
        if make_optimizer is None:
            return Wrapped(model=model.to(run.world.device), optimizer=None)
        with backend.surroundings(run.world):
            kwargs = DistributedDataParallelKwargs(
                bucket_cap_mb=self.bucket_mb, find_unused_parameters=self.find_unused, gradient_as_bucket_view=True
            )
            accelerator = backend.new_accelerator(self.settings, run.world, self._loading(), kwargs_handlers=[kwargs])
            prepared = accelerator.prepare_model(model)
        return Wrapped(model=prepared, optimizer=make_optimizer(model))

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        return _NOTHING if last else cast(Any, run.model).no_sync()

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def teardown(self, world: World) -> bool:
        backend.leave()
        return leave_process_group(world)

    def _loading(self) -> DataLoaderConfiguration:
        return DataLoaderConfiguration(split_batches=self.split_batches, dispatch_batches=self.dispatch_batches)
