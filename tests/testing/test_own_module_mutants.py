"""Strategies that are right for plain modules and wrong for modules of a user's own: a
case must name each.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcore import (
    Clip,
    OptimizerFactory,
    PreparedModel,
    Run,
    State,
    StepResult,
    StrategyError,
    defaults,
    hookimpl,
    load_config,
)
from distcore.registry import load
from distcore.testing import STRATEGIES
from distcore.testing.findings import Finding
from distcore.testing.laws import own_modules as own_module_laws
from distcore.testing.subject import Subject

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

DDPStrategy: Any = pytest.importorskip("distcore_ddp.strategy").DDPStrategy

MUTANTS: list[tuple[type[Any], str, str]] = []
"""A strategy, the case that must name it, and a pattern of what the case says."""


def breaks(case: str, says: str = "") -> Callable[[type[Any]], type[Any]]:
    def register(cls: type[Any]) -> type[Any]:
        MUTANTS.append((cls, case, says))
        return cls

    return register


def subject(make: Callable[[], object], *cases: str) -> Subject:
    known, config = STRATEGIES.own_modules, load_config(None, {"strategy": "ddp", "nproc": 2})
    return Subject(
        config=config, cases=tuple(known[case] for case in cases), make=lambda _config: make()
    )


def gradients(run: Run) -> list[Tensor]:
    return [parameter.grad for parameter in run.module.parameters() if parameter.grad is not None]


def step_of(run: Run) -> torch.optim.Optimizer:
    assert run.optimizer is not None  # the laws train
    return run.optimizer


class Alone(DDPStrategy):
    """Every rank trains by itself until its step, which adds gradients up over ranks."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        return defaults.wrap_model(run, model, make_optimizer)

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            self.add_up(parameter)
        return defaults.step(run, clip)

    def add_up(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            gradient = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            )
            dist.all_reduce(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
            parameter.grad = gradient


# Hooks on gradients


@breaks("hooks-on-gradients")
class ReplacesHooks(DDPStrategy):
    """Has a hook of its own in the place of the user's."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for parameter in model.parameters():
            own: Any = parameter
            for number in own._backward_hooks or ():
                own._backward_hooks[number] = lambda gradient: gradient
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@breaks("hooks-on-gradients")
class CallsHooksOnceMore(DDPStrategy):
    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for parameter in run.module.parameters():
            own: Any = parameter
            for hook in (own._backward_hooks or {}).values():
                parameter.grad = hook(parameter.grad)
        return defaults.step(run, clip)


@breaks("hooks-that-clip", "worst: ")
class IsNotProved(DDPStrategy):
    """Declares what keeps a run from being proved, and so differs in silence."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, owns=frozenset({"schedule"}))


@breaks("hooks-that-clip", "RuntimeError: hooks are not supported")
class FailsWithAnErrorOfItsOwn(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        if any(getattr(parameter, "_backward_hooks", None) for parameter in model.parameters()):
            raise RuntimeError("hooks are not supported")
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


# Weights


class ComputesWithCopies(Alone):
    """The forward pass reads copies of the weights; the optimizer steps the weights themselves."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        optimizer = make_optimizer(model) if make_optimizer else None
        return PreparedModel(
            model=copy.deepcopy(model) if optimizer else model, optimizer=optimizer
        )

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        with torch.no_grad():
            for copied, parameter in zip(
                run.model.parameters(), run.module.parameters(), strict=True
            ):
                copied.copy_(parameter)
        return nullcontext()

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for copied, parameter in zip(run.model.parameters(), run.module.parameters(), strict=True):
            parameter.grad, copied.grad = copied.grad, None
        result: StepResult = super().step(run, clip)
        return result


breaks("weights-written-in-forward")(ComputesWithCopies)
breaks("weights-in-the-loss")(ComputesWithCopies)


@breaks("weights-written-in-forward")
class RestoresWeights(DDPStrategy):
    """Steps from the weights as they were before the forward pass."""

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        before[:] = [parameter.detach().clone() for parameter in run.module.parameters()]
        accumulating: AbstractContextManager[object] = super().accumulate(run, last)
        return accumulating

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        with torch.no_grad():
            for parameter, value in zip(run.module.parameters(), before, strict=True):
                parameter.copy_(value)
        return defaults.step(run, clip)


before: list[Tensor] = []


class Sharded(nn.Linear):
    """A layer whose weight is whole inside of its own forward pass alone; elsewhere it
    is the first half.
    """

    inside = False

    @property
    def weight(self) -> Any:  # type: ignore[override]
        whole: Any = self._parameters["weight"]
        return whole if self.inside else self.part(whole)

    @staticmethod
    def part(whole: Tensor) -> Tensor:
        return whole[: len(whole) // 2]

    def forward(self, input: Tensor) -> Tensor:
        self.inside = True
        try:
            return super().forward(input)
        finally:
            self.inside = False


class Stale(Sharded):
    """A layer whose weight is what it was at the start, to all others."""

    @staticmethod
    def part(whole: Tensor) -> Tensor:
        began: Any = whole
        if not hasattr(began, "began"):
            began.began = whole.detach().clone()
        return began.began  # type: ignore[no-any-return]


class ShardsInSilence(DDPStrategy):
    kind: type[Sharded] = Sharded

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        for layer in model.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = self.kind
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@breaks("weights-read-in-forward")
@breaks("weights-in-the-loss")
class ShowsStaleWeights(ShardsInSilence):
    kind = Stale


breaks("weights-read-in-forward")(ShardsInSilence)


# Gradients


class Detached(nn.parallel.DistributedDataParallel):
    """A wrapper that copies its inputs, as one that moves them to a device."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return super().forward(*(each.detach().clone() for each in inputs), **named)


@breaks("gradients-of-inputs", "RuntimeError")
class DetachesInputs(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        prepared.model.__class__ = Detached
        return prepared


@breaks("gradients-of-inputs")
class CountsBackwardPasses(DDPStrategy):
    """Divides by the number of backward passes, and takes each for one of a micro-batch."""

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        model.register_full_backward_hook(lambda *_: passes.append(1))
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        passes.clear()
        return prepared

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for gradient in gradients(run):
            gradient /= max(1, len(passes))
        passes.clear()
        return defaults.step(run, clip)


passes: list[int] = []


@breaks("sparse-gradients")
class LeavesSparseAlone(Alone):
    """Adds up what is dense."""

    def add_up(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None or not parameter.grad.is_sparse:
            super().add_up(parameter)


@breaks("sparse-gradients")
class AddsValuesOfOtherRows(Alone):
    """Adds the values of sparse gradients up, whichever rows they belong to."""

    def add_up(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            super().add_up(parameter)
            return
        gradient = gradient.coalesce()
        padded = torch.zeros_like(parameter)
        values = gradient.values()
        padded[: len(values)] = values
        dist.all_reduce(padded)
        values.copy_(padded[: len(values)])
        parameter.grad = gradient


@breaks("branches-by-row")
class AveragesOverUsers(Alone):
    """Divides a gradient by the number of ranks that have it, times the ranks."""

    def add_up(self, parameter: nn.Parameter) -> None:
        has_one = torch.tensor([float(parameter.grad is not None)])
        dist.all_reduce(has_one)
        super().add_up(parameter)
        if parameter.grad is not None:
            parameter.grad *= dist.get_world_size() / max(1.0, float(has_one))


@breaks("branches-by-row")
class LeavesOutWhatARankLacks(Alone):
    """Adds up gradients that all ranks have, and forgets the others."""

    def add_up(self, parameter: nn.Parameter) -> None:
        has_one = torch.tensor([float(parameter.grad is not None)])
        dist.all_reduce(has_one)
        if float(has_one) == dist.get_world_size():
            super().add_up(parameter)
        else:
            parameter.grad = None


@breaks("changed-gradients")
class AddsUpAfterTheExtension(Alone):
    """Its gradients are this rank's own until the step, which an extension wraps."""


@breaks("changed-gradients")
class StepsWithCopiesOfGradients(DDPStrategy):
    """Keeps the gradients of the backward pass, and steps with those."""

    @hookimpl
    def backward(self, run: Run, loss: Tensor) -> Tensor:
        result = defaults.backward(run, loss)
        copied[:] = [gradient.clone() for gradient in gradients(run)]
        return result

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for gradient, value in zip(gradients(run), copied, strict=True):
            gradient.copy_(value)
        return defaults.step(run, clip)


copied: list[Tensor] = []


# States


class HoldsBuffers(DDPStrategy):
    """Gives buffers, after each step, the values that they had before it."""

    @hookimpl
    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        buffers[:] = [buffer.clone() for buffer in run.module.buffers()]
        accumulating: AbstractContextManager[object] = super().accumulate(run, last)
        return accumulating

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        for buffer, value in zip(run.module.buffers(), buffers, strict=True):
            buffer.copy_(value)
        return defaults.step(run, clip)


buffers: list[Tensor] = []
breaks("spectral-norm")(HoldsBuffers)
breaks("counts-of-forward", "wrong buffers: blocks.0.largest, ")(HoldsBuffers)


@breaks("spectral-norm")
class IteratesOnceMore(DDPStrategy):
    """Runs the model once more in each step, as one that measures shapes."""

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        with torch.no_grad():
            run.module(torch.ones(1, 1, dtype=torch.long))
        return defaults.step(run, clip)


@breaks("counts-of-forward", "blocks.0.seen")
class AddsBuffersUp(DDPStrategy):
    """Saves the sum of each count over ranks."""

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        state = dict(defaults.save_checkpoint(run))
        for name in [name for name, _ in run.module.named_buffers() if name.endswith("seen")]:
            total = run.module.get_buffer(name).clone()
            dist.all_reduce(total)
            state[f"model/{name}"] = total
        return state


class Saves(DDPStrategy):
    """Saves what a method makes of each tensor."""

    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        return {
            name: self.saved(name, value) for name, value in defaults.save_checkpoint(run).items()
        }

    def saved(self, name: str, value: Any) -> Any:
        return value


@breaks("odd-states", "head.keys")
class SavesThroughDoubles(Saves):
    def saved(self, name: str, value: Any) -> Any:
        return value.double().to(value.dtype) if name.endswith("keys") else value


@breaks(
    "odd-states", r"head.turns.* \(2 of 3 numbers, such as [\d.]+\+0j in place of [\d.]+\+[\d.]+j"
)
class SavesNoImaginaryParts(Saves):
    def saved(self, name: str, value: Any) -> Any:
        return (
            torch.complex(value.real, torch.zeros_like(value.real))
            if name.endswith("turns")
            else value
        )


@breaks("empty-parameters", "blocks.0.empty")
class SavesWhatHasElements(DDPStrategy):
    @hookimpl
    def save_checkpoint(self, run: Run) -> State:
        state = defaults.save_checkpoint(run)
        return {
            name: value
            for name, value in state.items()
            if not isinstance(value, Tensor) or value.numel()
        }


@breaks("empty-parameters", "RuntimeError: min")
class LooksAtAllWeights(DDPStrategy):
    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        assert all(torch.isfinite(parameter.min()) for parameter in model.parameters())
        prepared: PreparedModel = super().wrap_model(run, model, make_optimizer)
        return prepared


@breaks("complex-parameters")
class SavesRealParts(Saves):
    def saved(self, name: str, value: Any) -> Any:
        return (
            torch.complex(value.real, torch.zeros_like(value.real)) if value.is_complex() else value
        )


@breaks("complex-parameters")
class AveragesRealParts(Alone):
    def add_up(self, parameter: nn.Parameter) -> None:
        if not parameter.is_complex() or parameter.grad is None:
            super().add_up(parameter)
            return
        real = parameter.grad.real.clone()
        dist.all_reduce(real)
        parameter.grad = torch.complex(real, parameter.grad.imag)


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    """All in one launch of two ranks."""
    return [
        finding
        for (finding,) in STRATEGIES.measure_all(
            [subject(make, case) for make, case, _ in MUTANTS], limit=20
        )
    ]


@pytest.mark.parametrize(
    "number", range(len(MUTANTS)), ids=[f"{case}-{make.__name__}" for make, case, _ in MUTANTS]
)
def test_a_strategy_that_breaks_modules_of_a_users_own_is_named(
    number: int, findings: list[Finding]
) -> None:
    finding, (_, case, says) = findings[number], MUTANTS[number]
    assert finding.case == case
    assert finding.held is False, str(finding)
    assert re.search(says, str(finding)), str(finding)


def test_each_case_is_broken_by_two_strategies() -> None:
    cases = STRATEGIES.own_modules.keys()
    of_mutants = [case for _, case, _ in MUTANTS]
    assert {case for case in cases if of_mutants.count(case) >= 2} == cases


class RefusesOnOneRank(DDPStrategy):
    """Refuses spectral normalization on one rank, which others await."""

    @hookimpl
    def step(self, run: Run, clip: Clip) -> StepResult:
        bounded = any(name.endswith("original") for name, _ in run.module.named_parameters())
        if bounded and run.world.is_main:
            raise StrategyError("no spectral norm")
        dist.barrier()
        return defaults.step(run, clip)


def test_what_one_rank_refuses_while_others_wait_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_module_laws, "PATIENCE", 2.0)
    cases = ("spectral-norm", "hooks-on-gradients")
    (findings,) = STRATEGIES.measure_all([subject(RefusesOnOneRank, *cases)], limit=20)
    assert [finding.held for finding in findings] == [None, True]
    assert findings[0].note == "refused by one rank: no spectral norm"


def test_strategies_that_authors_begin_with_train_them_or_refuse_them(tmp_path: Path) -> None:
    """Contracts measure all other strategies; neither of these is installed here."""
    pytest.importorskip("distcore_workbench")
    write = import_module("distcore_workbench.commands.new").write_package
    skeleton = write("strategy", "my-own", tmp_path) / "distcore_my_own/__init__.py"
    tutorial = ROOT / "examples/strategy-localsgd/distcore_localsgd/__init__.py"
    cases = STRATEGIES.own_modules
    names = [f"{skeleton}:Strategy", f"{tutorial}:LocalSGD"]
    findings = STRATEGIES.measure_all([subject(load("strategies", name), *cases) for name in names])
    assert [str(each) for of_one in findings for each in of_one if each.held is False] == []
    # Refused may be what each declares that it lacks, and what has no single result.
    skipped = [{each.case for each in of_one if each.held is None} for of_one in findings]
    assert skipped == [{"hooks-that-clip", "sparse-gradients", "complex-parameters"}] * 2
