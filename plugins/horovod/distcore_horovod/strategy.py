"""``horovod``: the whole model on every rank, gradients summed by Horovod
while they are computed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from distcore import (
    Capabilities,
    Clip,
    ConfigError,
    Memory,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    SavedState,
    StepResult,
    World,
    defaults,
    device_of,
    footprint,
    hookimpl,
)
from distcore.launchers.processes import available_cores
from distcore_horovod import rank_environment
from distcore_horovod.collectives import broadcast, gather_rows, lost_peers, sum_over_ranks
from distcore_horovod.gradients import Op, distribute, find_unused_parameters, share_buffers
from distcore_horovod.library import hvd
from distcore_horovod.rendezvous import connect
from distcore_horovod.tracing import TracedFusion

_NO_CONTEXT = nullcontext()
FUSION_BYTES = 128 * 2**20
"""Default size of Horovod's fusion buffer."""
NEEDS_FIND_UNUSED = "needs strategy_options.find_unused=true"


@dataclass(frozen=True, kw_only=True)
class HorovodStrategy:
    """Replicate the model on every rank and all-reduce gradients with Horovod
    while they are computed.
    """

    tunes: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"groups": 4})

    op: Op = "sum"
    """How gradients are combined. ``sum`` and ``average`` train in the same way: the core scales
    the loss for either, but an average over ranks that are no power of two rounds once more.
    ``adasum`` combines optimizer steps instead of gradients.
    """
    compression: Literal["none", "fp16"] = "none"
    """Send gradients in half precision: half the traffic, but rounded. Laws 2 and 3 and parts of
    law 5 do not apply.
    """
    groups: Annotated[int, Field(ge=0)] = 1
    """Number of groups in which gradients are sent, each when it is complete: runs then repeat bit
    for bit. 0 sends
    gradients as they come, fused by timing: more overlap with backward, but above
    two ranks rounding varies.
    """
    fusion_mb: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Horovod's fusion buffer in MiB; default: HOROVOD_FUSION_THRESHOLD, or 128."""
    cycle_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Milliseconds between Horovod's checks for gradients to send;
    default: HOROVOD_CYCLE_TIME, or 1.
    """
    find_unused: bool = False
    """Allow parameters that get no gradient in some steps; costs one small all-reduce per step."""

    @property
    def capabilities(self) -> Capabilities:
        """The declaration for these options, which decide the kind of
        gradients and the exemptions.
        """
        return Capabilities(
            spec_version=3,
            devices=frozenset({"cpu", "cuda"}),
            gradients="sum" if self.op == "sum" else "mean",
            other_optimizers="none" if self.op == "adasum" else "all",
            phases=self.find_unused and self.op != "adasum",
            why_not_phases="adasum is not a mean" if self.op == "adasum" else NEEDS_FIND_UNUSED,
            owns=frozenset({"optimizer"}),
            hides_gradients=self.op == "adasum",
            lacks=frozenset({"sparse gradients", "complex parameters"}),
            ema=True,
            saves_alone=self.op != "adasum",
            compiles=frozenset({"on", "regions"}),
            launchers=frozenset({"local", "torchrun", "slurm", "mpi", rank_environment.NAME}),
            deterministic=bool(self.groups),
            exact=frozenset({"fp32", "bf16"} if self._sends_all_bits else ()),
            limits=(
                "compression=fp16 rounds gradients to half precision",
                (
                    "op=adasum is not a mean, so laws 2 and 3 do not hold; it needs a Horovod built"
                    " with MPI"
                ),
                (
                    "the rendezvous of several machines is open to their network until all ranks"
                    " are connected"
                ),
            ),
            exempt=self._exempt(),
        )

    @property
    def _sends_all_bits(self) -> bool:
        """True if ranks send gradients as they are, and sum them."""
        return self.compression == "none" and self.op != "adasum"

    def _exempt(self) -> dict[str, str]:
        from_files = ("weights-of-files", "frozen-of-files")
        inexact = (
            "gradient",
            "clipping",
            "neutral-names",
            *from_files,
            "scalar-parameters",
            "into-single",
            "from-single",
        )
        exempt = {}
        if not self.find_unused:
            exempt["unused-parameters"] = NEEDS_FIND_UNUSED
        if not self.groups:
            exempt |= dict.fromkeys(
                ("bit-for-bit", "dropout-repeats"), "groups=0: rounding of sums depends on timing"
            )
        if self.compression != "none":
            exempt |= dict.fromkeys(inexact, f"gradients are sent in {self.compression}")
        if self.op == "adasum":
            exempt |= dict.fromkeys(inexact, "adasum is not a mean")
        return exempt

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError for settings that this build of Horovod does not support."""
        how = "build it on a machine that has it (distcore-horovod build)"
        # a plan needs no GPU here
        if config.device == "cuda" and torch.cuda.device_count() and not hvd.nccl_built():
            raise ConfigError(
                f"device = 'cuda': this Horovod was built without NCCL; {how}, or use --set"
                " device=cpu"
            )
        self._fusion_bytes()  # refuses a variable that it cannot read
        if self.op != "adasum":
            return
        idle = {
            "groups": self.groups if self.groups > 1 else None,
            "find_unused": self.find_unused or None,
        }
        for name, value in idle.items():
            if value is not None:
                why = (
                    "has no effect with op = 'adasum', which combines steps; leave one of them out"
                )
                raise ConfigError(f"strategy_options.{name} = {str(value).lower()}: {why}")
        if not hvd.mpi_built():
            raise ConfigError(
                f"strategy_options.op = 'adasum': this Horovod was built without MPI; {how}"
            )
        if (
            config.precision == "fp16"
            or config.clip.norm is not None
            or config.clip.value is not None
        ):
            raise ConfigError(
                "strategy_options.op = 'adasum': combines steps, not gradients, so clipping and"
                " fp16 are not possible"
            )

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of model and fusion buffer.

        Raises ConfigError for adasum, which keeps copies.
        """
        if self.op == "adasum":
            raise ConfigError("strategy_options.op = 'adasum': its memory is not known")
        held = footprint.whole(meta_model, make_optimizer)
        on_wire = held.gradients // (1 if self.compression == "none" else 2)
        buffers = self._fusion_bytes() if ranks > 1 else 0
        return replace(held, buffers=buffers, sent=footprint.shared(on_wire, ranks, times=2))

    def traced(self) -> object:
        """Return a stand-in for Horovod, which a plan cannot start.

        Raises ConfigError for adasum.
        """
        if self.op == "adasum":
            raise ConfigError("strategy_options.op = 'adasum': its memory is not known")
        return TracedFusion(self._fusion_bytes(), halves=self.compression != "none")

    def _fusion_bytes(self) -> int:
        """Return the size of the fusion buffer.

        Raises ConfigError for a variable that is no number of bytes.
        """
        if self.fusion_mb is not None:
            return int(self.fusion_mb * 2**20)
        threshold = os.environ.get("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES))
        # Horovod itself would read the digits before the first other character
        if not threshold.isdecimal():
            raise ConfigError(
                f"HOROVOD_FUSION_THRESHOLD = {threshold!r}: expected bytes as a whole number; or"
                " use fusion_mb"
            )
        return int(threshold)

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Configure Horovod through its environment variables, and connect the ranks."""
        device = device_of(config, rank_info)
        over_mpi = self.op == "adasum"
        if over_mpi and rank_info.launcher != "mpi":
            how = f"start with mpirun, not {rank_info.launcher}"
            raise ConfigError(f"strategy_options.op = 'adasum': communicates by MPI; {how}")
        os.environ.update(self._variables(config))
        if rank_info.launcher == rank_environment.NAME and "OMP_NUM_THREADS" not in os.environ:
            share_cores(rank_info)
        connect(rank_info, config.timeout, over_mpi=over_mpi)
        return World(
            rank=hvd.rank(), size=hvd.size(), local_rank=rank_info.local_rank, device=device
        )

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Broadcast the model from the main rank, and wrap the optimizer."""
        model = model.to(run.world.device)
        for parameter in model.parameters():
            # Horovod refuses gradients of any other layout
            parameter.data = parameter.data.contiguous()
        broadcast(defaults.model_state(run))
        if make_optimizer is None:
            return PreparedModel(model=model, optimizer=None)
        # Under exact ranks run as many passes as they have blocks, and no pass writes a buffer.
        if run.config.exact is None:
            share_buffers(run)
        optimizer = distribute(model, make_optimizer(model), self.op, self.compression, self.groups)
        return PreparedModel(model=model, optimizer=optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Send gradients after the last micro-batch only, by Horovod's count of backward passes."""
        if run.accumulation > 1:
            _optimizer(run).set_backward_passes_per_step(1 if last else 2)
        return _NO_CONTEXT

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the default; after the last backward pass of a step, wait for the summed gradients.

        They are whole before ``step``, so that an extension may change them there. Turns the loss
        of a peer into ConnectionError.
        """
        optimizer = _optimizer(run)
        with lost_peers():
            result = defaults.backward(run, loss)
            is_last = optimizer.backward_passes_per_step == 1
            # adasum steps first, then combines the steps of all ranks
            if self.op == "adasum" or not is_last:
                return result
            unused = find_unused_parameters(run, find=self.find_unused)
            optimizer.synchronize()
        for parameter in unused:
            # Horovod has set it to zero, so weight decay would change the parameter
            parameter.grad = None
        return result

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step; the gradients are summed already.

        Earlier, each rank would clip its own.
        """
        if self.op == "adasum":
            with lost_peers():
                return defaults.step(run, clip)
        with _optimizer(run).skip_synchronize():
            return defaults.step(run, clip)

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        """Sum the values over ranks."""
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect the rows of all ranks, in rank order."""
        return gather_rows(outputs)

    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        """Load on every rank, then broadcast from the main rank.

        Horovod's own broadcast would step the optimizer.
        """
        defaults.load_checkpoint(run, state)
        optimizer = run.optimizer.state if run.optimizer else {}
        moments = {
            f"optimizer/{name}/{key}": value
            for name, parameter in run.module.named_parameters()
            for key, value in optimizer.get(parameter, {}).items()
        }
        broadcast(defaults.model_state(run) | moments)
        return True

    @hookimpl
    def teardown(self, world: World) -> bool:
        """Disconnect, all ranks at once."""
        hvd.barrier()  # a rank that leaves early would end the others' communication
        hvd.shutdown()
        return True

    def _variables(self, config: RunConfig) -> dict[str, str]:
        """Return Horovod's variables.

        A collective that a rank does not join ends the run after ``timeout`` seconds.
        """
        warn = max(1, min(60, config.timeout // 2))
        variables = {
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(warn),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(config.timeout, warn + 1)),
            "HOROVOD_DISABLE_GROUP_FUSION": "1",  # a group is sent alone: fusing depends on timing
            # distcore reports a lost peer itself
            "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "fatal"),
        }
        if self.fusion_mb is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(int(self.fusion_mb * 2**20))
        if self.cycle_ms is not None:
            variables["HOROVOD_CYCLE_TIME"] = str(self.cycle_ms)
        return variables


def share_cores(rank_info: RankInfo) -> None:
    """Limit torch's threads to this rank's share of the cores: ``horovodrun`` gives all
    cores to every rank.
    """
    torch.set_num_threads(max(1, available_cores() // rank_info.local_size))


def _optimizer(run: Run) -> Any:
    """Return the DistributedOptimizer that ``wrap_model`` made."""
    return run.optimizer
