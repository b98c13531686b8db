"""Each case of the task's contract is broken by a task that breaks the
promise which it measures.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distcore import Datasets, Phase, Progress, Ragged, RunConfig, Step, hookimpl, registry
from distcore.testing import TASKS
from distcore.testing.problem import Problem, RandomRows
from distcore.testing.variants import Phased, Referenced, TwoTerms, WholeBatch

MUTANTS: dict[str, type[Any]] = {}
"""A broken task by the case that must find it."""


def breaks(case: str) -> Any:
    def register(cls: type[Any]) -> type[Any]:
        MUTANTS[case] = dataclass(frozen=True, kw_only=True)(cls)
        return cls

    return register


class Sound(Problem):
    """Keeps every promise that can be measured."""

    metrics: ClassVar = {"loss": "min", "accuracy": "max"}

    def reopen(self, folder: Path, config: RunConfig) -> Datasets:
        none = RandomRows(1)
        return Datasets(train=none, evaluation=none, test=none)


class Changed:
    """A dataset of which some methods are replaced."""

    def __init__(self, rows: RandomRows, **changes: Any) -> None:
        self.rows = rows
        for name, value in changes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)


def with_train(data: Datasets, **changes: Any) -> Datasets:
    rows: Any = data.train
    return dataclasses.replace(data, train=Changed(rows, **changes))


@breaks("same-rows-again")
class OtherRowsEachTime(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        return dataclasses.replace(
            super().prepare(config), train=RandomRows(50, seed=random.randrange(2**32))
        )


@breaks("same-batch-again")
class MasksAtRandom(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)

        def batch(indices: np.ndarray) -> dict[str, Tensor]:
            whole: dict[str, Tensor] = data.train.batch(indices)
            return whole | {
                "tokens": (
                    whole["tokens"] * torch.bernoulli(torch.full(whole["tokens"].shape, 0.5)).long()
                )
            }

        return with_train(data, batch=batch)


@breaks("items-count")
class CountsBelowZero(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)
        return with_train(data, items=np.where(np.arange(50) == 3, -1, 1))


@breaks("draws-no-numbers")
class DrawsNoiseForItsLoss(Sound):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch) * (1 + torch.rand(()))


@breaks("loss-is-a-sum")
class ReturnsTheMean(Sound):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch) / len(batch["labels"])


@dataclass(frozen=True, kw_only=True)
class SoundWholeBatch(WholeBatch):
    """The same for a task whose loss is over the global batch."""


@breaks("embeds-rows-alone")
class EmbedsWithItsNeighbors(SoundWholeBatch):
    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        embeddings = super().embed(model, batch)
        return embeddings | {"logits": embeddings["logits"] - embeddings["logits"].mean(0)}


@dataclass(frozen=True, kw_only=True)
class SoundPhases(Phased):
    """The same for a task that trains in phases."""


@breaks("phases-reach-theirs")
class TrainsAPartThatNoLossReads(SoundPhases):
    def phases(self) -> dict[str, Phase]:
        both = super().phases()
        return both | {"body": Phase(both["body"].match, self.of_the_head)}

    def of_the_head(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(batch["tokens"])
        return (
            logits.detach().square().sum() + 0 * self.loss(model, batch).detach().requires_grad_()
        )


@dataclass(frozen=True, kw_only=True)
class SoundSteps(Problem):
    """The same for a task that makes its own steps."""

    def train_step(self, step: Step) -> Tensor:
        loss = step.gradients()
        step.apply()
        return loss


@breaks("own-steps-are-cut-anywhere")
class StepsByMicroBatch(SoundSteps):
    def train_step(self, step: Step) -> Tensor:
        losses = []
        for number in step.micro_batches:
            losses.append(step.backward(step.forward(number)))
            step.apply()
        return torch.stack(losses).sum()


@breaks("own-steps-continue")
class CountsOnItself(SoundSteps):
    def train_step(self, step: Step) -> Tensor:
        vars(self)["count"] = vars(self).get("count", 0) + 1
        loss = step.gradients()
        for parameter in step.parameters.values():
            if parameter.grad is not None:
                parameter.grad *= vars(self)["count"]
        step.apply()
        return loss


@breaks("own-steps-repeat")
class AddsNoiseAtRandom(SoundSteps):
    def train_step(self, step: Step) -> Tensor:
        loss = step.gradients()
        for parameter in step.parameters.values():
            if parameter.grad is not None:
                parameter.grad *= 1 + random.random()
        step.apply()
        return loss


@dataclass(frozen=True, kw_only=True)
class SoundState(Problem):
    """The same for a task that keeps a state."""

    seen: list[int] = field(default_factory=list, init=False)

    @hookimpl
    def on_step_end(self, progress: Progress) -> None:
        self.seen.append(progress.samples)

    def state(self) -> list[int]:
        return self.seen

    def load_state(self, state: list[int]) -> None:
        self.seen[:] = state


@breaks("state-continues")
class ForgetsItsState(SoundState):
    def load_state(self, state: list[int]) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class KeepsTheCount(SoundSteps):
    """Has steps that depend on a state, which a checkpoint keeps."""

    count: list[int] = field(default_factory=lambda: [0], init=False)

    def train_step(self, step: Step) -> Tensor:
        self.count[0] += 1
        loss = step.gradients()
        for parameter in step.parameters.values():
            if parameter.grad is not None:
                parameter.grad *= self.count[0]
        step.apply()
        return loss

    def state(self) -> list[int]:
        return self.count

    def load_state(self, state: list[int]) -> None:
        self.count[:] = state


@breaks("terms-count")
class CountsATermThatIsNotThere(TwoTerms):
    def loss(self, model: nn.Module, batch: dict[str, Tensor], log: Any) -> Any:  # type: ignore[override]
        loss, further = super().loss(model, batch, log)
        return loss, {"other": further["size"]}


@dataclass(frozen=True, kw_only=True)
class AsksForABatch(Referenced):
    """The answer of its frozen model for a row depends on the rows beside it."""

    def consult(self, frozen: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        began = super().consult(frozen, batch)["began"]
        return batch | {"began": began - began.mean(0)}


@breaks("loss-counts-items")
class CountsRowsTwice(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        data = super().prepare(config)
        rows: Any = data.evaluation
        return dataclasses.replace(data, evaluation=Changed(rows, items=np.full(len(rows), 2)))


@breaks("loss-is-fp32")
class LosesPrecision(Sound):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch).bfloat16()


@breaks("through-the-model")
class GoesAround(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model = super().build_model(config, data)
        KEPT.append(model)
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch) + 0 * super().loss(KEPT[-1], batch)


KEPT: list[nn.Module] = []


@breaks("rows-alone")
class LooksAtItsNeighbors(Sound):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = super().outputs(model, batch)
        return outputs | {"loss": outputs["loss"] - outputs["loss"].mean()}


@breaks("evaluation-changes-nothing")
class EvaluatesInTrainingMode(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return nn.Sequential(super().build_model(config, data), nn.BatchNorm1d(4))

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().outputs(model.train(), batch)


@breaks("asks-no-wrapper")
class AsksTheWrapper(Sound):
    def outputs(self, model, batch):
        given = super().outputs(model, batch)
        return given | {"loss": given["loss"] + model.training}


@breaks("metrics-are-there")
class ForgetsAMetric(Sound):
    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        return {"loss": 0.5, "accuracy": "high"}


@breaks("predictions-for-all-rows")
class LeavesOutALine(Sound):
    def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Any:
        return list(super().predictions(outputs, data))[1:]


@breaks("same-weights-again")
class SeedsItself(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        torch.manual_seed(random.randrange(2**32))
        return super().build_model(config, data)


@breaks("same-weights-in-parts")
class CountsItsModels(Sound):
    models: ClassVar[list[int]] = []

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model, number = super().build_model(config, data), len(self.models)
        self.models.append(number)
        nn.init.constant_(model.get_parameter("head.bias"), number)
        return model


@breaks("reopens-without-data")
class BuildsFromItsRows(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model = super().build_model(config, data)
        model.register_buffer("seen", torch.zeros(len(data.train)))
        return model


@breaks("rows-are-identified")
class HasNoName(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        return with_train(super().prepare(config), content="")


class CountsPasses(nn.Module):
    """A model whose outputs shrink with the number of training passes, which it keeps wherever
    a subclass has it.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.begin()

    def begin(self) -> None:
        self.passes = 0

    def count(self) -> int:
        self.passes += self.training
        return self.passes

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens)
        return logits / (1 + self.count())


class CountsInABuffer(CountsPasses):
    """Counts in a buffer, which is saved unless a subclass says otherwise."""

    is_saved = False

    def begin(self) -> None:
        self.register_buffer("passes", torch.zeros((), dtype=torch.long), persistent=self.is_saved)


class CountsInASavedBuffer(CountsInABuffer):
    is_saved = True


class CountsInExtraState(CountsPasses):
    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state


@breaks("steps-continue")
class Counts(Sound):
    counter: ClassVar[type[CountsPasses]] = CountsPasses

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return self.counter(super().build_model(config, data))


@breaks("options-survive")
class ForgetsAnOption(Sound):
    size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size + 1)


@breaks("builds-without-storage")
class BuildsOtherwiseOnMeta(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model = super().build_model(config, data)
        if torch.get_default_device().type == "meta":
            model.register_parameter("more", nn.Parameter(torch.zeros(1)))
        return model


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    load = registry.load

    def measure(task: type[Any], case: str) -> Any:
        monkeypatch.setattr(
            registry, "load", lambda group, name: task if group == "tasks" else load(group, name)
        )
        (finding,) = TASKS.measure("mutant", only=[case])
        return finding

    return measure


@pytest.mark.parametrize("case", TASKS.cases)
def test_a_sound_task_keeps_it(case: str, measured: Any) -> None:
    others = {
        "embeds-rows-alone": SoundWholeBatch,
        "phases-reach-theirs": SoundPhases,
        "state-continues": SoundState,
    }
    task = SoundSteps if case.startswith("own-steps") else others.get(case, Sound)
    assert measured(task, case).held, str(measured(task, case))


@pytest.mark.parametrize(
    "case", ["loss-is-a-sum", "rows-alone", "terms-count", "through-the-model"]
)
@pytest.mark.parametrize("task", [TwoTerms, Referenced, SoundPhases])
def test_tasks_with_terms_frozen_models_and_phases_are_measured_too(
    task: type[Any], case: str, measured: Any
) -> None:
    assert measured(task, case).held, str(measured(task, case))


@pytest.mark.parametrize("case", ["own-steps-continue", "state-continues"])
def test_own_steps_with_a_state_continue(case: str, measured: Any) -> None:
    assert measured(KeepsTheCount, case).held, str(measured(KeepsTheCount, case))


def test_a_frozen_model_that_is_asked_for_a_batch_is_found(measured: Any) -> None:
    assert measured(AsksForABatch, "loss-is-a-sum").held is False


class GivesRagged(Sound):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        kept = batch["tokens"] != 0
        return super().outputs(model, batch) | {
            "tokens": Ragged(batch["tokens"][kept], kept.sum(1))
        }


class PadsItsRaggedRows(Sound):
    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        kept = torch.ones_like(batch["tokens"], dtype=torch.bool)
        return super().outputs(model, batch) | {
            "tokens": Ragged(batch["tokens"][kept], kept.sum(1))
        }


def test_rows_that_differ_in_size_are_compared_too(measured: Any) -> None:
    assert measured(dataclass(frozen=True, kw_only=True)(GivesRagged), "rows-alone").held
    broken = measured(dataclass(frozen=True, kw_only=True)(PadsItsRaggedRows), "rows-alone")
    assert broken.held is False
    assert "output 'tokens'" in broken.note


@pytest.mark.parametrize("case", TASKS.cases)
def test_a_broken_task_is_found(case: str, measured: Any) -> None:
    finding = measured(MUTANTS[case], case)
    assert finding.held is False, str(finding)
    assert finding.error is None or finding.error > 0


class DrawsByItself(CountsPasses):
    """Draws from a generator of its own, which each new model seeds alike."""

    def begin(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def count(self) -> int:
        return int(torch.randint(9, (), generator=self.noise))


class KeepsALastLoss(Sound):
    """A task that keeps a value of each step in itself, and weighs the next one by it."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        before = getattr(self, "last", 1.0)
        now = float(loss.detach())
        object.__setattr__(self, "last", now)
        return loss * (2 if now < before else 1)


class CountedReads(RandomRows):
    """Rows whose items grow with the number of batches that were read."""

    read = 0

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        self.read += 1
        whole = super().batch(indices)
        return whole | {"items": whole["items"] * self.read}


class WeighsByReads(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        return dataclasses.replace(super().prepare(config), train=CountedReads(50))


ASIDE = {
    CountsPasses: "attribute 'passes'",
    CountsInABuffer: "buffer 'passes'",
    DrawsByItself: "attribute 'noise'",
    KeepsALastLoss: "attribute 'last' of the task",
    WeighsByReads: "attribute 'read' of the rows",
}


def counting(counter: type[Any]) -> type[Any]:
    """A sound task with such a model, or the task itself."""
    if issubclass(counter, Problem):
        return dataclass(frozen=True, kw_only=True)(counter)
    return dataclass(frozen=True, kw_only=True)(type("Counting", (Counts,), {"counter": counter}))


@pytest.mark.parametrize("counter", ASIDE)
def test_state_that_a_resume_loses_is_found_and_named(counter: type[Any], measured: Any) -> None:
    finding = measured(counting(counter), "steps-continue")
    assert finding.held is False
    assert (
        f"a checkpoint lacks {ASIDE[counter]}; keep it in a persistent buffer, in get_extra"
        in finding.note
    )


@pytest.mark.parametrize("counter", [CountsInASavedBuffer, CountsInExtraState])
def test_state_that_a_checkpoint_has_is_no_fault(counter: type[Any], measured: Any) -> None:
    assert measured(counting(counter), "steps-continue").held


@dataclass(frozen=True, kw_only=True)
class RowsOfItsRank(Sound):
    def prepare(self, config: RunConfig) -> Datasets:
        return dataclasses.replace(
            super().prepare(config), train=RandomRows(50, seed=int(os.environ.get("RANK", "0")))
        )


@dataclass(frozen=True, kw_only=True)
class WarmsUpByACounter(Sound):
    calls: ClassVar[list[int]] = []

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.calls.append(1)
        return super().loss(model, batch) * (1 + len(self.calls))


@dataclass(frozen=True, kw_only=True)
class LooksAsideOnceItIsTrained(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        model = super().build_model(config, data)
        model.register_parameter("aside", nn.Parameter(torch.zeros(1)))
        return model

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs, aside = super().outputs(model, batch), model.get_parameter("aside")
        return outputs | {"loss": outputs["loss"] + aside * outputs["loss"].mean()}


@dataclass(frozen=True, kw_only=True)
class MixesManyRows(Sound):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch) * (1 if len(batch["labels"]) <= 8 else 0.5)


@pytest.mark.parametrize(
    ("task", "case"),
    [
        (RowsOfItsRank, "same-rows-again"),
        (WarmsUpByACounter, "loss-is-a-sum"),
        (MixesManyRows, "loss-is-a-sum"),
        (LooksAsideOnceItIsTrained, "rows-alone"),
    ],
)
def test_a_fault_on_another_rank_later_or_in_a_larger_batch_is_seen(
    task: type[Any], case: str, measured: Any
) -> None:
    finding = measured(task, case)
    assert finding.held is False, str(finding)


def test_a_loss_that_draws_is_named_by_its_line_and_is_no_wrong_sum(measured: Any) -> None:
    finding = measured(DrawsNoiseForItsLoss, "draws-no-numbers")
    assert re.match(
        r"draws at random: \S*test_task_mutants\.py:\d+; distcore\.row_random", finding.note
    )
    assert measured(DrawsNoiseForItsLoss, "loss-is-a-sum").held is None


@dataclass(frozen=True, kw_only=True)
class Normalizes(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return nn.Sequential(super().build_model(config, data), nn.BatchNorm1d(4))


def test_batch_normalization_is_no_sum_over_rows(measured: Any) -> None:
    finding = measured(Normalizes, "loss-is-a-sum")
    assert finding.held is None
    assert "over all rows of a step" in finding.note


class FrozenStatistics(nn.Module):
    """A model whose batch normalization stays in evaluation mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.normalize = inner, nn.BatchNorm1d(4).requires_grad_(False)

    def train(self, mode: bool = True) -> FrozenStatistics:
        super().train(mode)
        self.normalize.eval()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.normalize(self.inner(tokens))
        return logits


@dataclass(frozen=True, kw_only=True)
class KeepsStatistics(Sound):
    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return FrozenStatistics(super().build_model(config, data))


@pytest.mark.parametrize(
    "case", ["loss-is-a-sum", "through-the-model", "rows-alone", "evaluation-changes-nothing"]
)
def test_batch_normalization_that_stays_in_evaluation_mode_is_no_fault(
    case: str, measured: Any
) -> None:
    assert measured(KeepsStatistics, case).held, str(measured(KeepsStatistics, case))
