"""``ddp``: torch's DistributedDataParallel, which keeps the whole model on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
    StepResult,
    World,
    defaults,
    footprint,
    hookimpl,
    join_process_group,
)
from distcore_ddp.replicas import (
    check_gradients_averaged,
    explain_second_gradients,
    has_state_in_buffers,
    rebuild_gradient_buckets,
    spare_evaluations,
    spare_unsendable_buffers,
)
from distcore_ddp.sums import DTYPES, Sending, sum_hook
from distcore_ddp.traced_buckets import TracedBuckets

_NO_CONTEXT = nullcontext()  # has no state: one serves every micro-batch
REMEDY = "freeze it, or --set strategy_options.find_unused=true"
"""Advice for a parameter that gets no gradient."""
INEXACT = (
    "gradient",
    "clipping",
    "neutral-names",
    "weights-of-files",
    "frozen-of-files",
    "scalar-parameters",
    "into-single",
    "from-single",
)
"""Laws and cases that rounded gradients break."""
BROADCAST = 250 * 2**20
"""Most bytes that DDP copies at once as it sends rank 0's weights to the others."""
NEEDS_FIND_UNUSED = "needs strategy_options.find_unused=true"


@dataclass
class DDPState:
    """The strategy's state during a run."""

    wrapped: DistributedDataParallel
    """The model in DDP."""
    sending: Sending
    """Whether DDP's hook sends gradients."""
    has_run: bool = False
    """True once a micro-batch has run: the first backward pass records a static graph, so
    DDP must see it.
    """


@dataclass(frozen=True, kw_only=True)
class DDPStrategy:
    """Replicate the model on every rank and average gradients while they are computed."""

    tunes: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"bucket_mb": 5}, {"bucket_mb": 100})
    """Options that ``distcore tune`` tries."""

    bucket_mb: Annotated[int, Field(ge=0)] = 25
    """Gradient bucket size in MiB; larger buckets overlap less and launch fewer
    collectives. 0: one per parameter.
    """
    static_graph: bool = False
    """Promise that the same parameters get gradients in every step, in the same order, so that
    DDP can plan ahead.
    """
    find_unused: bool = False
    """Allow parameters that get no gradient in some steps. DDP then walks over the
    graph in every step.
    """
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Send gradients in half precision: half the traffic, but rounded. Laws 2 and 3 and parts of
    law 5 do not apply.
    """

    @property
    def capabilities(self) -> Capabilities:
        """A step all-reduces gradients and broadcasts buffers; ``find_unused`` adds a
        mask of used parameters.
        """
        is_fp16 = self.compression == "fp16"  # torch adds no sparse tensors of it
        return Capabilities(
            spec_version=3,
            gradients="sum",
            other_optimizers="all",
            phases=self.find_unused,
            why_not_phases=NEEDS_FIND_UNUSED,
            own_steps=not self.static_graph,
            inner_gradients="none" if self.static_graph else "all",
            ema=True,
            saves_alone=True,
            lacks=frozenset({"sparse gradients"} if is_fp16 else ()),
            compiles=frozenset({"on", "regions"}),
            collectives_per_step=3 if self.find_unused else 2,
            exact=frozenset({"fp32", "bf16"} if self.compression == "none" else ()),
            limits=("compression other than none sends gradients in half precision",),
            exempt=self._exempt(),
        )

    def _exempt(self) -> dict[str, str]:
        """Return what the options give up, each law or case with its reason."""
        exempt = {}
        if not (self.find_unused or self.static_graph):
            exempt["unused-parameters"] = NEEDS_FIND_UNUSED
        if self.static_graph:
            exempt["branches-by-row"] = "static_graph promises that each step uses the same layers"
            exempt["bit-for-bit"] = (
                "on three or more ranks the first step of a process rounds otherwise: torch then "
                "regroups its buckets"
            )
        if self.compression != "none":
            reason = f"gradients are sent in {self.compression}"
            exempt |= dict.fromkeys(INEXACT, reason)
        return exempt

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError for two options of which torch ignores one."""
        if self.static_graph and self.find_unused:
            raise ConfigError(
                "strategy_options.find_unused = true: has no effect with static_graph = true, which"
                " finds unused parameters in the first step and promises that they stay the same;"
                " leave out one of them"
            )

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of the whole model. Each step all-reduces its gradients."""
        memory = footprint.whole(meta_model, make_optimizer)
        gradients_on_wire = memory.gradients
        if self.compression != "none":
            gradients_on_wire //= 2
        # A ring all-reduces in two rounds: one adds the gradients, one spreads the sums.
        sent_per_step = footprint.shared(gradients_on_wire, ranks, times=2)
        weights_copied_at_start = min(BROADCAST, memory.parameters)
        return replace(memory, sent=sent_per_step, starting=weights_copied_at_start)

    def traced(self) -> object:
        """Return a stand-in for ``distcore plan`` with buckets like DDP's.

        DDP itself cannot run on fake tensors.
        """
        return TracedBuckets(self.bucket_mb, DTYPES[self.compression])

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        """Join torch's process group."""
        return join_process_group(config, rank_info)

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Wrap the model in DDP. For an evaluation, only move it to the device."""
        model = model.to(run.world.device)
        # An evaluation needs no gradients. DDP's forward may communicate, so ranks would need
        # equally many batches.
        if make_optimizer is None:
            return PreparedModel(model=model, optimizer=None)
        spare_unsendable_buffers(model)
        is_on_cpu = run.world.device.type == "cpu"
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if is_on_cpu else [run.world.device],
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
        )
        # Set here, because torch has renamed the argument.
        wrapped.broadcast_buffers = has_state_in_buffers(model)
        sending = Sending()
        wrapped.register_comm_hook(sending, sum_hook(self.compression))
        # A dummy backward pass makes torch regroup buckets now. A static graph would record that
        # pass, and with find_unused torch never regroups.
        if not (self.static_graph or self.find_unused):
            rebuild_gradient_buckets(wrapped, model)
        spare_evaluations(wrapped)
        optimizer = make_optimizer(model)
        return PreparedModel(model=wrapped, optimizer=optimizer, state=DDPState(wrapped, sending))

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """All-reduce in the last micro-batch of a step.

        DDP sees the run's first one, too, if it records a graph.
        """
        if last:
            return _NO_CONTEXT
        state: DDPState = run.strategy_state
        is_graph_recorded_now = self.static_graph and not state.has_run
        if is_graph_recorded_now:
            # Under ``no_sync`` DDP would not see the pass. So it does, and only its hook sends
            # nothing: gradients that are summed now would be summed again in the last micro-batch.
            return state.sending.paused()
        return state.wrapped.no_sync()

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Run the default backward pass, after which DDP has recorded a static graph."""
        with explain_second_gradients(run.module):
            share = defaults.backward(run, loss)
        # Here, not where ``accumulate`` ends: the forward pass may be in a block of its own.
        state: DDPState = run.strategy_state
        state.has_run = True
        return share

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step.

        Raises StrategyError, one line, for an unused parameter unless an option allows it.
        """
        # Exact gradients are summed by the core: DDP has seen no pass.
        finds_unused = self.static_graph or self.find_unused or run.config.exact is not None
        if not finds_unused:
            check_gradients_averaged(run.model, run.module, REMEDY)
        return defaults.step(run, clip)
