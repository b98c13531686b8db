"""Strategies that are broken on purpose: each must be caught by the law that it breaks."""

from __future__ import annotations

import copy
import re
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategy_mutants import Mutants, subject
from torch import Tensor, nn

from distcore import (
    BatchPlan,
    BuiltModel,
    Clip,
    MicroBatch,
    ModelSource,
    OptimizerFactory,
    PreparedModel,
    Run,
    RunConfig,
    Sampler,
    State,
    StepResult,
    World,
    defaults,
    hookimpl,
    rank_sampler,
)
from distcore.distributed import gather_rows
from distcore.plugin.strategy.state import SavedState
from distcore.testing import STRATEGIES
from distcore.testing.findings import Finding

pytestmark = pytest.mark.ranks

ddp: Any = pytest.importorskip("distcore_ddp.strategy")
DDPStrategy: Any = ddp.DDPStrategy


MUTANTS = Mutants()
mutant = MUTANTS.register


@mutant(
    "gradient",
    "partitions",
    "gradients are 1/2 of what is due in step 1: a mean over 2 ranks that is divided again",
)
class DividesTwice(DDPStrategy):
    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        return defaults.backward(run, loss / run.world.size)


@mutant(
    "gradient",
    "partitions",
    "gradients are 2 times too large in step 1: a sum over 2 ranks that nobody divides",
)
class SumsInsteadOfMeans(DDPStrategy):
    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        defaults.backward(run, loss * run.world.size)
        return loss.detach()


@mutant("gradient", "partitions")
class DividesByAccumulation(DDPStrategy):
    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        defaults.backward(run, loss / run.accumulation)
        return loss.detach()


@mutant("order", "rows-of-a-step", "given twice, not at all or elsewhere")
class SamplerIgnoresRank(DDPStrategy):
    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        return rank_sampler(plan, 0, run.world.size)


class Plain(DDPStrategy):
    """Every rank trains by itself: what a subclass does about that is its own."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        return defaults.wrap_model(run, model, make_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        return defaults.backward(run, loss)

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        return defaults.step(run, clip)


@mutant("gradient", "partitions")
class NeverSynchronizes(Plain):
    pass


@mutant("gradient", "ranks-hold-one-model")
class AveragesOnMainRankOnly(Plain):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        sum_gradients(run, keep=run.world.is_main)
        return defaults.step(run, clip)


@mutant("surprise", "collectives-per-step", "2 allreduce")
class SynchronizesEveryMicroBatch(DDPStrategy):
    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        return nullcontext()


@mutant("surprise", "collectives-per-step", "1 barrier")
class WaitsAfterEveryStep(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        dist.barrier()
        return defaults.step(run, clip)


@mutant("gradient", "partitions")
class KeepsGradients(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        norm = defaults.clip_gradients(optimizer_of(run), clip)
        optimizer_of(run).step()
        return StepResult(grad_norm=norm)


@mutant("clipping", "clip-by-norm")
class ClipsBeforeSynchronizing(Plain):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        norm = defaults.clip_gradients(optimizer_of(run), clip)
        sum_gradients(run)
        defaults.step(run, Clip(norm=None))
        return StepResult(grad_norm=norm)


@mutant("clipping", "clip-by-norm", "gradient norm, step 1: 0.0499999 for")
class ReportsNormAfterClipping(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        defaults.clip_gradients(optimizer_of(run), clip)
        return defaults.step(run, Clip(norm=1e9))


@mutant("clipping", "norm-of-a-large-tensor")
class AddsSquaresInFP32(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        norm = nn.utils.get_total_norm(
            [p.grad for p in run.module.parameters() if p.grad is not None]
        )
        defaults.step(run, clip)
        return StepResult(grad_norm=norm)


@mutant("clipping", "clip-by-value")
class IgnoresClippingByValue(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        return defaults.step(run, Clip(norm=clip.norm))


@mutant("gradient", "ranks-without-rows")
class CountsStandInRows(DDPStrategy):
    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        split = rank_sampler(plan, run.world.rank, run.world.size)
        return lambda epoch, step: [
            replace(micro, is_padding=False) for micro in split(epoch, step)
        ]


@mutant("evaluation", "every-size", "evaluation returned 2 rows, 1 of them different")
class EvaluatesStandInRows(CountsStandInRows):
    pass


@mutant("order", "rows-of-a-step")
class DropsRaggedTail(DDPStrategy):
    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        split = rank_sampler(plan, run.world.rank, run.world.size)

        def sampler(epoch: int, step: int) -> list[MicroBatch]:
            ragged = len(plan.rows(epoch, step)) < plan.global_batch
            return [
                replace(micro, is_padding=micro.is_padding or ragged)
                for micro in split(epoch, step)
            ]

        return sampler


@mutant("checkpoint", "neutral-names", "tensors are missing")
class ForgetsMoments(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        return {
            name: value
            for name, value in defaults.save_checkpoint(run).items()
            if name.startswith("model/")
        }


@mutant("checkpoint", "from-single")
class DoesNotRestoreMoments(DDPStrategy):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        return defaults.load_checkpoint(replace(run, optimizer=None), state)


@mutant("resume", "each-row-once")
class SamplerStartsOver(DDPStrategy):
    @hookimpl
    def build_sampler(self, run: Run, plan: BatchPlan) -> Sampler:
        split, first = rank_sampler(plan, run.world.rank, run.world.size), []

        def sampler(epoch: int, step: int) -> Any:
            first.append(step)
            return split(epoch, step - first[0])

        return sampler


@mutant("clipping", "schedule")
class StepsScheduleOncePerRank(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        result = defaults.step(run, clip)
        for _ in range(run.world.size - 1):
            if run.scheduler:
                run.scheduler.step()
        return result


@mutant("gradient", "ragged-tail", r"hook step\(\): returned NoneType, not StepResult")
class AnswersNothing(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> None:
        defaults.step(run, clip)


@mutant("checkpoint", "round-trip", "worst model/(mask|seen|rounded)")
class LeavesBuffersStale(DDPStrategy):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        before = {name: buffer.clone() for name, buffer in run.module.named_buffers()}
        defaults.load_checkpoint(run, state)
        for name, buffer in run.module.named_buffers():
            buffer.copy_(before[name])
        return True


@mutant("checkpoint", "loads-into-every-rank")
class LoadsOnMainRankOnly(DDPStrategy):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        return not run.world.is_main or defaults.load_checkpoint(run, state)


@mutant("evaluation", "buffers-agree", "largest difference")
class EvaluatesACopy(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        prepared: PreparedModel = super().wrap_model(run, copy.deepcopy(model), make_optimizer)
        return prepared


@mutant("evaluation", "gather-unequal", "rows, order or dtype")
class GathersOutOfOrder(DDPStrategy):
    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.flip(0) for name, value in gather_rows(outputs).items()}


@mutant("evaluation", "gather-unequal", "rows, order or dtype")
class GathersInOneDtype(DDPStrategy):
    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.double() for name, value in gather_rows(outputs).items()}


@mutant("agreement", "true-world", r"2 ranks were started .* in which ranks \[0\] answer")
class FallsBackToOneProcess(DDPStrategy):
    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return outputs


class StaysInTraining(nn.parallel.DistributedDataParallel):
    """A wrapper that computes as in training, whatever mode the core has chosen."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        mode = self.module.training
        self.module.train()
        try:
            return super().forward(*inputs, **named)
        finally:
            self.module.train(mode)


@mutant("evaluation", "every-size")
class EvaluatesWithDropout(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        optimizer, wrapped = (
            make_optimizer(model) if make_optimizer else None,
            StaysInTraining(model),
        )
        return PreparedModel(model=wrapped, optimizer=optimizer, state=ddp.DDPState(wrapped))


@mutant("gradient", "parameter-groups")
class DecaysEverything(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        wrapped: PreparedModel = super().wrap_model(run, model, make_optimizer)
        for group in wrapped.optimizer.param_groups if wrapped.optimizer else []:
            group["weight_decay"] = run.config.optimizer.options["weight_decay"]
        return wrapped


@mutant("gradient", "further-terms")
class StepsWithTheSum(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= run.world.size
        return defaults.step(run, clip)


@mutant("gradient", "frozen-model")
class TakesEveryModelForTheTrainedOne(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        if make_optimizer is None:
            return PreparedModel(model=run_of_training[-1].model, optimizer=None)
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        run_of_training.append(prepared)
        return prepared


run_of_training: list[PreparedModel] = []


@mutant("surprise", "frozen-same-after")
class TrainsTheFrozenModel(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        frozen.extend(model.parameters() if make_optimizer is None else ())
        return prepared

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in frozen:
            parameter.data += 1e-3
        return defaults.step(run, clip)


frozen: list[nn.Parameter] = []


@mutant("surprise", "repeated-blocks-sent-once")
class SendsAfterEachCall(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for block in model.get_submodule("blocks").children():
            block.register_full_backward_hook(lambda *_: dist.all_reduce(torch.zeros(1)) and None)
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("checkpoint", "frozen-not-saved")
class SavesTheFrozenModel(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        return defaults.save_checkpoint(run) | {
            f"model/{name}.weight": torch.ones(1) for name in run.frozen
        }


@mutant("checkpoint", "weights-of-files", "tied, and another head")
class TiesWhatItsConfigTies(DDPStrategy):
    @hookimpl
    def build_model(self, config: RunConfig, world: World, source: ModelSource) -> BuiltModel:
        made, model = source.meta_model(), source.build()
        if made.get_parameter("head.weight") is made.get_parameter("embedding.weight"):
            model.get_submodule("head").weight = model.get_parameter("embedding.weight")
        return BuiltModel(model=model)


@mutant("checkpoint", "frozen-of-files")
class ScalesTheFrozenModel(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        if make_optimizer is None:
            for parameter in model.parameters():
                parameter.data *= 1.1
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("checkpoint", "saved-by-one-rank")
class NeedsOthersToSave(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        dist.barrier()
        return defaults.save_checkpoint(run)


@mutant("checkpoint", "saved-by-one-rank")
class ChangesWeightsBeforeTheStep(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            parameter.data *= 1 - 1e-6
        return defaults.step(run, clip)


@mutant("gradient", "whole-batch")
class GathersNothingInSteps(DDPStrategy):
    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return gather_rows(outputs) if "logits" not in outputs else outputs


@dataclass(frozen=True, kw_only=True)
class FindsUnused(DDPStrategy):
    """What the contract of ``ddp`` measures as TestFindUnused: it keeps every law."""

    find_unused: bool = True


@mutant("gradient", "recomputed-statistics", "num_batches_tracked")
class LosesHooksOfLayers(FindsUnused):
    """Builds layers anew, without the hooks that hold statistics in a recomputation."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for layer in model.modules():
            layer._forward_pre_hooks.clear()
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("gradient", "phases")
class StepsTheIdlePart(FindsUnused):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return defaults.step(run, clip)


def with_group_values(prepared: PreparedModel, **values: object) -> PreparedModel:
    """The model with these values in all groups of its optimizer."""
    for group in prepared.optimizer.param_groups if prepared.optimizer else []:
        group.update(values)
    return prepared


@mutant("gradient", "phases")
class GivesAllOneRate(FindsUnused):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        return with_group_values(super().wrap_model(run, model, make_optimizer), lr=run.config.lr)


@mutant("resume", "phases-continue")
class ForgetsOnePlayer(FindsUnused):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        defaults.load_checkpoint(run, state)
        for name, parameter in run.module.named_parameters():
            if name.startswith("head."):
                optimizer_of(run).state.pop(parameter, None)
        return True


@mutant("gradient", "own-steps")
class AveragesNotBeforeTheStep(Plain):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        sum_gradients(run)
        return defaults.step(run, clip)


@mutant("gradient", "logged-sums")
class LogsItsOwn(DDPStrategy):
    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return values


@mutant("agreement", "wishes-are-agreed")
class HearsItself(DDPStrategy):
    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        return values


class FusedDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return input * torch.rand_like(input).ge(self.p) / (1 - self.p) if self.training else input


@mutant("gradient", "dropout-by-row")
class BringsItsOwnDropout(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.__class__ = FusedDropout
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("gradient", "dropout-repeats")
class DrawsOtherNoiseEachTime(BringsItsOwnDropout):
    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        torch.manual_seed(time.time_ns() % 2**32)
        accumulating: AbstractContextManager[object] = super().accumulate(run, last)
        return accumulating


@mutant("gradient", "tied-parameters", "rank 1 .*stuck|on this rank alone|rank 1 of 2 failed")
class FailsOnOneRank(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        if run.world.rank == 1:
            raise ValueError("only here")
        return defaults.step(run, clip)


def steps_of(run: Run) -> int:
    """Steps that the optimizer has done."""
    return int(optimizer_of(run).state[next(run.module.parameters())].get("step", 0))


@mutant("gradient", "ragged-tail")
class StopsSynchronizingLater(Plain):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        if steps_of(run) < 10:
            sum_gradients(run)
        return defaults.step(run, clip)


@mutant("gradient", "ragged-tail")
class StepsOnlyWhereItClips(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        if clip.norm is None:
            optimizer_of(run).zero_grad()
            return StepResult(grad_norm=None)
        return defaults.step(run, clip)


@mutant("gradient", "parameter-groups")
class IgnoresBetas(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        return with_group_values(super().wrap_model(run, model, make_optimizer), betas=(0.9, 0.999))


@mutant("gradient", "tied-parameters")
class AveragesOverUses(DDPStrategy):
    """Takes a block that is called twice in one pass for two blocks."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for block in model.get_submodule("blocks").children():
            block.register_forward_hook(
                lambda block, *_: uses.update({block: uses.get(block, 0) + 1})
            )
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        uses.clear()
        accumulating: AbstractContextManager[object] = super().accumulate(run, last)
        return accumulating

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for block, times in uses.items():
            for parameter in block.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / times
        return defaults.step(run, clip)


uses: dict[nn.Module, int] = {}


@mutant("gradient", "dropout-repeats")
class TrainsOtherwiseAfterAnEvaluation(DDPStrategy):
    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if "prediction" in outputs:
            run.module.register_buffer("evaluated", torch.ones(()), persistent=False)
        return gather_rows(outputs)

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        return defaults.backward(run, loss * (2 if hasattr(run.module, "evaluated") else 1))


@mutant("checkpoint", "round-trip", r"'(seen|mask)': .*of torch.float32, where the model has torch")
class SavesEveryBufferAsFloats(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        state = defaults.save_checkpoint(run)
        return {
            name: value.float() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }


@mutant("checkpoint", "into-single", "with sgd")
class SavesTheMomentsOfAdam(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        state = defaults.save_checkpoint(run)
        return {
            name: value for name, value in state.items() if not name.endswith("/momentum_buffer")
        }


@mutant("evaluation", "without-optimizer")
class LoadsNothingToEvaluate(DDPStrategy):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        return run.optimizer is None or defaults.load_checkpoint(run, state)


@mutant("evaluation", "gather-unequal", "rows, order or dtype")
class GathersThroughFloats(DDPStrategy):
    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        joined = gather_rows({name: value.double() for name, value in outputs.items()})
        return {name: value.to(outputs[name].dtype) for name, value in joined.items()}


@mutant("evaluation", "sum-over-ranks")
class AddsInSinglePrecision(DDPStrategy):
    @hookimpl
    def reduce_loss(self, run: Run, values: Tensor) -> Tensor:
        total = values.float()
        dist.all_reduce(total)
        return total.double()


@mutant("gradient", "parameter-groups")
class GivesEachGroupOneRate(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        return with_group_values(super().wrap_model(run, model, make_optimizer), lr=run.config.lr)


@mutant("gradient", "fp16")
class SkipsAlone(Plain):
    """Where a gradient overflows, this rank skips the step and the others go on."""

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        if run.scaler is None:
            sum_gradients(run)
            return defaults.step(run, clip)
        run.scaler.unscale_(optimizer_of(run))
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0, 0, 0)
        sum_gradients(run)
        norm = defaults.clip_gradients(optimizer_of(run), clip)
        run.scaler.step(optimizer_of(run))
        run.scaler.update()
        optimizer_of(run).zero_grad()
        return StepResult(grad_norm=norm)


@mutant("checkpoint", "round-trip", "torch.bfloat16")
class TakesTheDtypeOfTheCheckpoint(DDPStrategy):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        defaults.load_checkpoint(run, state)
        for name, parameter in run.module.named_parameters():
            parameter.data = state[f"model/{name}"].clone()
        return True


@mutant("checkpoint", "scalar-parameters")
class AveragesRowsOnly(Plain):
    """Leaves to each rank the gradient of a parameter that has no rows."""

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        sum_gradients(run, rows=True)
        return defaults.step(run, clip)


@mutant("gradient", "frozen-16-bits", "saved as torch.float32; a rank holds 1024 bytes of 512")
class WidensFrozenWeights(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("gradient", "frozen-16-bits", "holds no tensor .model/frozen.weight")
class LeavesOutHalfPrecision(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        halves = {
            f"model/{name}"
            for name, value in run.module.named_parameters()
            if value.dtype == torch.bfloat16
        }
        return {
            name: value
            for name, value in defaults.save_checkpoint(run).items()
            if name not in halves
        }


@mutant("gradient", "frozen-bytes")
class TakesBytesForNumbers(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for parameter in model.parameters():
            parameter.data = (
                parameter.data.float() if parameter.dtype == torch.uint8 else parameter.data
            )
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("gradient", "chunked-loss")
class ComputesTheHeadItself(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        head: Any = model.get_submodule("head")
        head.forward = lambda hidden: nn.functional.linear(hidden, head.weight, head.bias)
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@mutant("resume", "eight-bit-moments", "[1-9][0-9]* tensors are not as AdamW's|KeyError")
class SavesTheStateAsItIsHeld(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        state = {
            name: held
            for name, held in defaults.save_checkpoint(run).items()
            if name.startswith("model/")
        }
        for name, parameter in run.module.named_parameters():
            own = run.optimizer.state.get(parameter, {}) if run.optimizer else {}
            state |= {
                f"optimizer/{name}/{key}": value
                for key, value in own.items()
                if isinstance(value, Tensor)
            }
        return state


@mutant("resume", "eight-bit-moments")
class LoadsTheStateIntoTheOptimizer(DDPStrategy):
    @hookimpl
    def load_checkpoint(self, run: Run, state: SavedState) -> bool:
        loaded = defaults.load_checkpoint(run, state)
        for name, parameter in run.module.named_parameters():
            keys = [key for key in state if key.startswith(f"optimizer/{name}/")]
            if run.optimizer and keys:
                run.optimizer.state[parameter] = {
                    key.rpartition("/")[2]: state[key].clone() for key in keys
                }
        return loaded


class AveragesWithItsPartner(Plain):
    """Ranks exchange in pairs, as two ranks may; of three the last one stays alone."""

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                every = [torch.empty_like(parameter.grad) for _ in range(run.world.size)]
                dist.all_gather(every, parameter.grad)
                pair = every[run.world.rank // 2 * 2 :][:2]
                parameter.grad.copy_(torch.stack(pair).sum(0))
        return defaults.step(run, clip)


class GathersMainRankFirst(DDPStrategy):
    """Rows of the main rank come first, those of the others from the last one on."""

    @hookimpl
    def gather_outputs(self, run: Run, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        ranks = torch.full((len(next(iter(outputs.values()), [])),), run.world.rank)
        joined = gather_rows(outputs | {"ranks": ranks})
        order = torch.argsort(-joined.pop("ranks") % run.world.size, stable=True)
        return {name: value[order] for name, value in joined.items()}


def optimizer_of(run: Run) -> torch.optim.Optimizer:
    assert run.optimizer is not None  # the laws train
    return run.optimizer


def sum_gradients(run: Run, keep: bool = True, rows: bool = False) -> None:
    for parameter in run.module.parameters():
        if parameter.grad is not None and (parameter.dim() or not rows):
            total = parameter.grad.clone()
            dist.all_reduce(total)
            if keep:
                parameter.grad.copy_(total)


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    """All mutants in one launch of two ranks, and one more for the mutant that
    takes its ranks down.
    """
    return MUTANTS.measure(nproc=2)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_by_the_law_it_breaks(name: str, findings: dict[str, Finding]) -> None:
    finding, expected = findings[name], MUTANTS[name]
    assert finding.held is False, str(finding)
    assert finding.law == expected.breaks
    assert re.search(expected.says, str(finding)), str(finding)
    # Else it would be caught by a slip of its own, not by what the law measures.
    assert "has no attribute" not in str(finding), str(finding)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make",
    [WidensFrozenWeights, TakesBytesForNumbers, ComputesTheHeadItself, SavesTheStateAsItIsHeld],
)
def test_a_mutant_that_saves_memory_wrongly_breaks_one_case(make: type) -> None:
    (of_subject,) = STRATEGIES.measure_all([subject(make, *STRATEGIES.required)])
    broken = [finding.case for finding in of_subject if finding.held is False]
    assert broken == [MUTANTS[make.__name__].case]


class Sleeps(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        steps = optimizer_of(run).state[next(run.module.parameters())].get("step", 0)
        if run.world.rank == 1 and steps == 2:
            time.sleep(60)
        return defaults.step(run, clip)


def test_a_stuck_rank_is_named_with_hook_and_step_and_other_cases_go_on() -> None:
    ((stuck, other),) = STRATEGIES.measure_all(
        [subject(Sleeps, "ragged-tail", "gather-unequal")], limit=8
    )
    assert stuck.held is False
    assert "after 8 s rank 1 is stuck in hook step(), step 2" in stuck.note
    assert other.held


OF_THREE = {AveragesWithItsPartner: "partitions", GathersMainRankFirst: "gather-unequal"}


@pytest.mark.slow
def test_three_ranks_show_what_two_cannot() -> None:
    for nproc, held in ((2, True), (3, False)):
        measured = STRATEGIES.measure_all(
            [subject(make, case, nproc=nproc) for make, case in OF_THREE.items()]
        )
        assert [finding.held for (finding,) in measured] == [held] * len(OF_THREE), measured
    (right,) = STRATEGIES.measure_all([subject(DDPStrategy, *OF_THREE.values(), nproc=3)])
    assert all(finding.held for finding in right)
