"""The backend of Accelerate with DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcore import (
    Capabilities,
    Clip,
    Memory,
    OptimizerFactory,
    PreparedModel,
    Run,
    RunConfig,
    StepResult,
    StrategyError,
    World,
    footprint,
)
from distcore_accelerate.backend import Backend
from distcore_ddp import (
    TracedBuckets,
    check_gradients_averaged,
    explain_second_gradients,
    has_state_in_buffers,
    rebuild_gradient_buckets,
    spare_evaluations,
    spare_unsendable_buffers,
    sum_hook,
)

_NOTHING = nullcontext()
REMEDY = "freeze it, or --set strategy_options.find_unused=true"
"""Advice for a parameter that gets no gradient."""
NEEDS_FIND_UNUSED = "needs strategy_options.find_unused=true"


class Replicated(Backend):
    """Replicate the model on every rank. Precision, clipping and checkpoints are the core's."""

    def capabilities(self) -> Capabilities:
        """Declare one more collective per step with ``find_unused``, and unused
        parameters exempt without it.
        """
        find_unused = self.options.find_unused
        return Capabilities(
            spec_version=3,
            gradients="sum",
            devices=frozenset({"cpu", "cuda"}),
            other_optimizers="all",
            phases=find_unused,
            why_not_phases=NEEDS_FIND_UNUSED,
            own_steps=True,
            ema=True,
            saves_alone=True,
            compiles=frozenset({"on", "regions"}),
            collectives_per_step=3 if find_unused else 2,
            exempt={} if find_unused else {"unused-parameters": NEEDS_FIND_UNUSED},
        )

    def plugins(self, config: RunConfig, world: World) -> dict[str, Any]:
        """Return the options of DDP in Accelerate's form."""
        handler = DistributedDataParallelKwargs(
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=self.options.find_unused,
            gradient_as_bucket_view=True,
        )
        return {"kwargs_handlers": [handler]}

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of the whole model. Each step all-reduces its gradients."""
        held = footprint.whole(meta_model, make_optimizer)
        return replace(held, sent=footprint.shared(held.gradients, ranks, times=2))

    def traced(self) -> object:
        """Return a stand-in that emulates DDP's buckets."""
        return TracedBuckets(self.options.bucket_mb)

    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """Wrap the model in DDP. The optimizer stays plain, because the core does the
        work of Accelerate's wrapper.
        """
        spare_unsendable_buffers(model)
        prepared = accelerator.prepare_model(model)
        if not isinstance(prepared, DistributedDataParallel):
            # on an accelerator Accelerate leaves the model of a single rank as it is
            if run.world.size == 1:
                return PreparedModel(model=prepared, optimizer=make_optimizer(model))
            raise StrategyError(
                f"accelerate fell back: ddp was asked for, the model is a {type(prepared).__name__}"
            )
        prepared.broadcast_buffers = has_state_in_buffers(model)
        prepared.register_comm_hook(None, sum_hook())
        if not prepared.find_unused_parameters:  # with it DDP does not rebuild its buckets
            rebuild_gradient_buckets(prepared, prepared.module)
        spare_evaluations(prepared)
        return PreparedModel(model=prepared, optimizer=make_optimizer(model), state=prepared)

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Return DDP's ``no_sync`` for every micro-batch but the last."""
        wrapped: DistributedDataParallel | None = run.strategy_state
        return _NOTHING if last or wrapped is None else wrapped.no_sync()

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add the gradients of the scalar ``loss``; return it detached."""
        with explain_second_gradients(run.module):
            return super().backward(run, loss)

    def step(self, run: Run, clip: Clip) -> StepResult:
        """Clip and step.

        Raises StrategyError, one line, for a parameter without a gradient if none was expected.
        """
        if run.strategy_state is not None and not self.options.find_unused:
            check_gradients_averaged(run.strategy_state, run.module, REMEDY)
        return super().step(run, clip)
