"""``ddp``: torch's DistributedDataParallel, the model whole on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distcore import (
    Capabilities,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    World,
    gather_rows,
    has_state_in_buffers,
    hookimpl,
    join_process_group,
    lay_out_gradients,
    leave_process_group,
    sum_over_ranks,
)
from distcore_ddp.compression import compression_hook

_NOTHING = nullcontext()


class _Replicated(DistributedDataParallel):
    """torch learns a static graph in the first backward of all, which must synchronise for that."""

    began = False


@dataclass(frozen=True, kw_only=True)
class DDPStrategy:
    """Replicate the model on every rank and average gradients while they are computed."""

    bucket_mb: int = 25
    """Gradient bucket size in MiB; larger buckets overlap less and launch fewer collectives."""
    static_graph: bool = False
    """The same parameters take part in every step, in the same order: lets DDP plan ahead."""
    find_unused: bool = False
    """Some parameters take no part in some steps; costs a walk over the graph each step."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Send gradients in half precision: half the traffic, and no longer exactly the gradient of law 2."""

    @property
    def capabilities(self) -> Capabilities:
        """A step all-reduces gradients and broadcasts buffers that hold state; ``find_unused`` adds what was used."""
        return Capabilities(
            spec_version=2,
            collectives_per_step=3 if self.find_unused else 2,
            limits=("compression other than none rounds gradients to half precision on the wire",),
            exempt=self._exempt(),
        )

    def _exempt(self) -> dict[str, str]:
        exempt = {}
        if not (self.find_unused or self.static_graph):
            exempt["unused-parameters"] = "needs strategy_options.find_unused=true"
        if self.static_graph and not self.find_unused:
            exempt["bit-for-bit"] = "above two ranks: torch moves buckets after a process's first step, and sums round"
        if self.compression != "none":
            reason = f"gradients travel in {self.compression}"
            exempt |= dict.fromkeys(("gradient", "clipping", "neutral-names", "into-single", "from-single"), reason)
        return exempt

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        return join_process_group(config, rank_info)

    @hookimpl
    def wrap_model(self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None) -> PreparedModel:
        model = model.to(run.world.device)
        if make_optimizer is None:  # evaluation sends no gradients, and DDP would need rows on every rank
            return PreparedModel(model=model, optimizer=None)
        replicated = _Replicated(
            model,
            device_ids=[run.world.device] if run.world.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused,
        )
        replicated.broadcast_buffers = has_state_in_buffers(model)  # as an argument, torch renamed it
        if self.compression != "none":
            replicated.register_comm_hook(None, compression_hook(self.compression))
        if not (self.static_graph or self.find_unused):  # there a graph must stay the same, here nothing moves
            lay_out_gradients(replicated, model)
        return PreparedModel(model=replicated, optimizer=make_optimizer(model))

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        replicated = cast(_Replicated, run.model)
        if last or (self.static_graph and not replicated.began):
            replicated.began = True
            return _NOTHING
        return replicated.no_sync()

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return sum_over_ranks(values)

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs)

    @hookimpl
    def teardown(self, world: World) -> bool:
        return leave_process_group(world)
