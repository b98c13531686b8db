"""``horovod``: the model whole on every rank, gradients averaged by Horovod's all-reduce while they are computed."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    ConfigError,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    StepResult,
    World,
    available_cores,
    defaults,
    device_of,
    hookimpl,
)
from distcore_horovod import launcher
from distcore_horovod.gradients import Op, distribute, share_buffers, without_gradient
from distcore_horovod.library import hvd
from distcore_horovod.rendezvous import connect
from distcore_horovod.wire import broadcast, gather_rows, lost_peers, total

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class HorovodStrategy:
    """Replicate the model on every rank and all-reduce gradients with Horovod while they are computed."""

    op: Op = "average"
    """How gradients are combined. ``sum`` and ``average`` train alike: the core scales the loss for either."""
    compression: Literal["none", "fp16"] = "none"
    """Send gradients in half precision: half the traffic, and no longer exactly the gradient of law 2."""
    groups: Annotated[int, Field(ge=0)] = 1
    """Send gradients in so many groups, each when it is whole: a run repeats itself bit for bit. 0 sends them as they
    come, fused by the clock: more overlap with backward, and above two ranks sums that round otherwise each time."""
    fusion_mb: Annotated[float, Field(ge=0)] | None = None
    """Horovod's fusion buffer in MiB; by default what HOROVOD_FUSION_THRESHOLD says, or 128."""
    cycle_ms: Annotated[float, Field(gt=0)] | None = None
    """Milliseconds between two looks at what can be sent; by default what HOROVOD_CYCLE_TIME says, or 1."""
    find_unused: bool = False
    """Some parameters take no part in some steps; costs one small all-reduce each step."""

    @property
    def capabilities(self) -> Capabilities:
        """What holds of all options, and whether gradients come out as a mean or as a sum."""
        return Capabilities(
            spec_version=2,
            gradients="sum" if self.op == "sum" else "mean",
            launchers=frozenset({"local", "torchrun", "slurm", "mpi", launcher.NAME}),
            limits=(
                "compression=fp16 rounds gradients to half precision on the wire",
                "op=adasum is no mean: laws 2 and 3 do not hold, and it needs a Horovod that was built with MPI",
                "the rendezvous on several machines is open to their network until all ranks are connected",
            ),
            exempt=self._exempt(),
        )

    def _exempt(self) -> dict[str, str]:
        inexact = ("gradient", "clipping", "neutral-names", "into-single", "from-single")
        exempt = {}
        if not self.find_unused:
            exempt["unused-parameters"] = "needs strategy_options.find_unused=true"
        if not self.groups:
            exempt |= dict.fromkeys(("bit-for-bit", "dropout-repeats"), "groups=0: sums round as gradients come")
        if self.compression != "none":
            exempt |= dict.fromkeys(inexact, f"gradients travel in {self.compression}")
        if self.op == "adasum":
            exempt |= dict.fromkeys(inexact, "adasum is no mean")
        return exempt

    def check_config(self, config: RunConfig) -> None:
        """Refuse what this build of Horovod cannot do, before any rank starts."""
        how = "build it again where there is one (distcore-horovod build)"
        if config.device == "cuda" and not hvd.nccl_built():
            raise ConfigError(f"device = 'cuda': this Horovod was built without NCCL; {how}, or use --set device=cpu")
        if self.op != "adasum":
            return
        if not hvd.mpi_built():
            raise ConfigError(f"strategy_options.op = 'adasum': this Horovod was built without MPI; {how}")
        if config.precision == "fp16" or config.clip.norm is not None or config.clip.value is not None:
            raise ConfigError("strategy_options.op = 'adasum': combines steps, not gradients: no clipping, no fp16")

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        device = device_of(config, rank_info)
        over_mpi = self.op == "adasum"
        if over_mpi and rank_info.launcher != "mpi":
            how = f"start with mpirun, not {rank_info.launcher}"
            raise ConfigError(f"strategy_options.op = 'adasum': goes over MPI; {how}")
        os.environ.update(self._variables(config))
        if rank_info.launcher == launcher.NAME and "OMP_NUM_THREADS" not in os.environ:
            share_cores(rank_info)
        connect(rank_info, config.timeout, over_mpi=over_mpi)
        return World(rank=hvd.rank(), size=hvd.size(), local_rank=rank_info.local_rank, device=device)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        model = model.to(run.world.device)
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # Horovod refuses gradients of another layout
        broadcast(defaults.model_state(run))
        if make_optimizer is None:
            return PreparedModel(model=model, optimizer=None)
        share_buffers(run)
        optimizer = distribute(model, make_optimizer(model), self.op, self.compression, self.groups)
        return PreparedModel(model=model, optimizer=optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Have the next backward pass send its gradients, or one pass later: so a step may end at any micro-batch."""
        if run.accumulation > 1:
            _horovod(run).set_backward_passes_per_step(1 if last else 2)
        return _NOTHING

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        with lost_peers():
            return defaults.backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Wait for the gradients before anything reads them: clipped earlier, each rank would clip by its own."""
        optimizer = _horovod(run)
        with lost_peers():
            if self.op == "adasum":  # it steps first, and combines the steps
                return defaults.step(run, clip)
            unused = without_gradient(run, find=self.find_unused)
            optimizer.synchronize()
        for parameter in unused:
            parameter.grad = None  # Horovod made it zero, and weight decay would move it
        with optimizer.skip_synchronize():
            return defaults.step(run, clip)

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return total(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        """Load on every rank, then take the main rank's: Horovod's own broadcast of an optimizer would step it."""
        defaults.load_checkpoint(run, state)
        broadcast(defaults.model_state(run) | defaults.optimizer_state(run))
        return True

    @hookimpl
    def teardown(self, world: World) -> bool:
        hvd.barrier()  # the first to leave would end what others still do
        hvd.shutdown()
        return True

    def _variables(self, config: RunConfig) -> dict[str, str]:
        """Horovod's settings for this run; a collective that a rank leaves out ends it after ``config.timeout``."""
        warn = max(1, min(60, config.timeout // 2))
        variables = {
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(warn),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(config.timeout, warn + 1)),
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "fatal"),  # it cries when a peer dies; so do we
        }
        if self.fusion_mb is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(int(self.fusion_mb * 2**20))
        if self.cycle_ms is not None:
            variables["HOROVOD_CYCLE_TIME"] = str(self.cycle_ms)
        return variables


def share_cores(rank_info: RankInfo) -> None:
    """Give each rank its share of this machine's cores: ``horovodrun`` leaves all of them to every rank."""
    torch.set_num_threads(max(1, available_cores() // rank_info.local_size))


def _horovod(run: Run) -> Any:
    """The run's optimizer, as ``wrap_model`` wrapped it."""
    return run.optimizer
