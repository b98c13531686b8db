"""Strategies that lose the bits of ``exact`` on purpose: law 10 must catch each by its case."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from strategy_mutants import Mutants, subject
from torch import Tensor, nn

from distcore import (
    BatchPlan,
    Clip,
    OptimizerFactory,
    PreparedModel,
    RankInfo,
    Run,
    RunConfig,
    Sampler,
    StepResult,
    World,
    defaults,
    hookimpl,
    rank_sampler,
)
from distcore.engine.grid import FINEST

pytestmark = pytest.mark.ranks

ddp: Any = pytest.importorskip("distcore_ddp.strategy")
DDPStrategy: Any = ddp.DDPStrategy
fsdp: Any = pytest.importorskip("distcore_fsdp.strategy")
FSDPStrategy: Any = fsdp.FSDPStrategy
RANKS = 3
"""Two ranks hide a division by their number, which is exact."""


MUTANTS = Mutants()
mutant = partial(MUTANTS.register, "bits")


class Changes:
    """Changes a name of the core from setup to teardown."""

    change: ClassVar[tuple[str, Any]]
    """The name, and what it is for this strategy."""

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        patch(*self.change).start()
        world: World = super().setup(config, rank_info)  # type: ignore[misc]
        return world

    @hookimpl
    def teardown(self, world: World) -> bool:
        patch.stopall()
        return defaults.teardown(world)


class Patched(Changes, DDPStrategy):
    """Changes a name of the core where each rank has whole weights."""


class PatchedShards(Changes, FSDPStrategy):
    """Changes a name of the core where ranks have shards."""


@mutant("bits-of-ranks")
class AveragesOverThree(Patched):
    """Scales the loss by the ranks, and divides the gradient by them again."""

    change = (
        "distcore.plugin.strategy.contract.Run.loss_multiplier",
        property(lambda run: run.world.shards),
    )

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= run.world.shards
        return defaults.step(run, clip)


@mutant("bits-of-ranks")
class CutsByRanks(DDPStrategy):
    """Gives each rank rows of its own in the place of whole blocks."""

    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        return rank_sampler(replace(plan, blocks=None), run.world.shard, run.world.shards)


@mutant("bits-of-evaluation")
class CutsEvaluationsByRanks(DDPStrategy):
    """Cuts the rows that are evaluated by the number of ranks."""

    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        evaluates = plan.order == "longest-first"
        blocks = None if evaluates else plan.blocks
        return rank_sampler(replace(plan, blocks=blocks), run.world.shard, run.world.shards)


@mutant("bits-of-ranks")
class AddsRanksInSinglePrecision(DDPStrategy):
    """Sends exact sums of each rank, rounded to fp32."""

    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        total = values.float()
        dist.all_reduce(total)
        return total.double()


@mutant("bits-of-clipping")
class AddsNormsOfShards(DDPStrategy):
    """Clips by a norm whose squares are added in fp32, each rank's part first."""

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        gradients = [each.grad for each in run.module.parameters() if each.grad is not None]
        mine = [torch.tensor_split(each.flatten(), run.world.size) for each in gradients]
        square = torch.stack([parts[run.world.rank].square().sum() for parts in mine]).sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        factor = (clip.norm / (norm + 1e-6)).clamp(max=1.0) if clip.norm else torch.ones(())
        for gradient in gradients:
            gradient *= factor
        return replace(defaults.step(run, Clip(norm=None, value=clip.value)), grad_norm=norm)


@mutant("bits-of-dropout")
class DrawsByRank(DDPStrategy):
    """Has each rank draw masks of its own."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        def draw(*_: object) -> None:
            torch.manual_seed(torch.initial_seed() + run.world.rank)

        model.register_forward_pre_hook(draw)
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("bits-of-wide-sums")
class AddsWithoutAGrid(Patched):
    """Adds gradients in fp64 as they are."""

    change = ("distcore.engine.exact.round_to_grid", lambda values, bits: values)


@mutant("bits-of-wide-sums")
class StaysOnTheFinestGrid(Patched):
    """Adds gradients that are too large for the grid on it all the same."""

    change = ("distcore.engine.exact.bits_of_grid", lambda greatest: FINEST)


@mutant("bits-of-a-global-loss")
class OrdersRowsByRanks(Patched):
    """Has rows that are twice in a step in the order of the ranks."""

    change = (
        "distcore.engine.whole_batch._serials",
        lambda run, micros: (
            torch.arange(sum(len(micro.indices) for micro, _ in micros)) + (run.world.shard << 32)
        ),
    )


@mutant("bits-of-evaluation")
class AddsSumsAsTheyCome(Patched):
    """Adds sums over batches in the order of the ranks."""

    change = (
        "distcore.plugin.task.outputs._sums_in_order",
        lambda sums: {name: parts.sum(0) for name, parts in sums.items()},
    )


@mutant("bits-of-shards")
class EndsAsTorchStepsThem(PatchedShards):
    """Leaves the ends of tensors, and so of shards, as torch's fused kernel steps them."""

    change = ("distcore.model.optim.step_ends_in_vectors", lambda optimizer: None)


@mutant("bits-of-wide-sums")
class AddsShardsWithoutAGrid(PatchedShards):
    """Adds gradients of shards in fp64 as they are."""

    change = ("distcore.engine.exact_shards.round_to_grid", lambda values, bits: values)


@mutant("bits-of-ranks")
class AddsShardsInSinglePrecision(PatchedShards):
    """Leaves torch to add gradients on the grid in fp32."""

    change = ("distcore.engine.exact_shards.widen", lambda parameter: None)


class SendsAtEachCall:
    """Stands for what lets a unit send at the last of its calls alone."""

    def __init__(self, *_: object) -> None: ...

    def begin(self, last: bool) -> None:
        """Begin a micro-batch."""

    def finish(self) -> None:
        """End a backward pass."""


@mutant("bits-of-repeated-layers")
class SendsTwice(PatchedShards):
    """Sends the gradients of a layer that is called twice in two parts."""

    change = ("distcore_fsdp.strategy.RepeatedCalls", SendsAtEachCall)


def test_each_mutant_is_caught_by_its_case() -> None:
    # By default ddp refuses phases, and its own tests of the laws leave this case out.
    takes_phases = subject(partial(DDPStrategy, find_unused=True), "bits-of-phases", nproc=RANKS)
    findings = MUTANTS.measure(RANKS, takes_phases)
    caught = {name for name, finding in findings.items() if finding.held is False}
    assert caught == set(MUTANTS)
    for finding in findings.values():
        assert "elements with other bits" in finding.note
