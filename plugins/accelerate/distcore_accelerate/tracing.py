"""Run Accelerate's FSDP2 on fake tensors, on any machine, for the traced
steps of ``distcore plan``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace

from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from distcore import OptimizerFactory, PreparedModel, Run, hookimpl
from distcore_accelerate.backend import Backend
from distcore_accelerate.precision import mixed_precision, results_in_fp32
from distcore_accelerate.sharded_state import ShardedState
from distcore_accelerate.wrapping import choose_layers


class TracedShards:
    """A stand-in that shards as ``Accelerator.prepare`` does on GPUs.

    On a CPU ``prepare`` falls back to DDP.
    """

    def __init__(self, backend: Backend) -> None:
        self.capabilities = backend.capabilities()
        self._backend = backend

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Shard the model in place with Accelerate's own function."""
        world = run.world
        plugin = self._backend.plugins(run.config, world)["fsdp_plugin"]
        choose_layers(plugin, model)
        # The attributes that Accelerate's function reads: an Accelerator would start ranks.
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh=init_device_mesh(
                world.device.type, (world.size,), mesh_dim_names=("fsdp",)
            ),
            parallelism_config=SimpleNamespace(fsdp_dim_names=("fsdp",)),
            mixed_precision=mixed_precision(run.config),
            is_main_process=False,
            device=world.device,
        )
        sharded = fsdp2_prepare_model(accelerator, model)
        optimizer = make_optimizer(sharded) if make_optimizer else None
        state = ShardedState.of_training(sharded)
        return PreparedModel(model=results_in_fp32(run, sharded), optimizer=optimizer, state=state)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Run the backend's ``accumulate``."""
        return self._backend.accumulate(run, last)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the backend's ``backward``."""
        return self._backend.backward(run, loss)
