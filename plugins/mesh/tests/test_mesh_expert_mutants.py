"""Shared experts that are wrong on purpose: the kit's case of a mixture must name each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distcore import RankInfo, RunConfig, World, defaults, hookimpl, load_config
from distcore.config import with_changes
from distcore.testing import STRATEGIES
from distcore.testing.subject import Subject
from distcore_mesh import clipping, expert_parallel
from distcore_mesh.expert_parallel import Dispatch, Forward
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.strategy import MeshStrategy

pytestmark = pytest.mark.ranks

PARALLEL = "distcore_mesh.expert_parallel."


@dataclass(frozen=True)
class Mutant:
    """A strategy with one function replaced."""

    options: dict[str, Any]
    replaced: str
    by: Callable[..., Any]

    def build(self, _: RunConfig) -> object:
        """Build the strategy."""
        return Broken(**self.options, replaced=self.replaced, by=self.by)


MUTANTS: dict[str, Mutant] = {}


def mutant(options: dict[str, int], replaced: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        MUTANTS[function.__name__] = Mutant(options, replaced, function)
        return function

    return register


@dataclass(frozen=True, kw_only=True)
class Broken(MeshStrategy):
    """Has ``replaced`` replaced from setup to teardown."""

    replaced: str
    by: Callable[..., Any]

    @hookimpl
    def setup(self, config: RunConfig, rank_info: RankInfo) -> World:
        patch(self.replaced, self.by).start()
        return super().setup(config, rank_info)

    @hookimpl
    def teardown(self, world: World) -> bool:
        patch.stopall()
        return defaults.teardown(world)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scaled(tensor: Tensor, factor: float) -> Tensor:
    result: Tensor = ScaledGradient.apply(tensor, factor)
    return result


@mutant({"ep": 2}, PARALLEL + "_exchange_tokens")
def averages_over_owners(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """The gradient of an expert is a mean over ranks, that of tokens a sum."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # of parameters alone: what enters is scaled back
        outputs = experts(scaled(hidden, group.size), chosen, weights)
        return scaled(outputs, 1 / group.size)

    return EXCHANGE_TOKENS(group, each, forward)


@mutant({"ep": 2}, PARALLEL + "_exchange_tokens")
def leaves_results_sorted(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """Results come back by expert, and are given to the tokens in their order."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        dispatch = Dispatch.of_choices(group, chosen, each)
        tokens = dispatch.out(hidden[dispatch.order // chosen.shape[1]])
        computed = expert_parallel._computed(experts, tokens, dispatch.experts)
        results = dispatch.back(computed)[dispatch.order]
        return (results.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    return forward


@mutant({"ep": 2}, PARALLEL + "_exchange_tokens")
def detaches_the_router(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """The weights of the chosen experts have no gradient."""
    right = EXCHANGE_TOKENS(group, each, experts)
    return lambda hidden, chosen, weights: right(hidden, chosen, weights.detach())


@mutant({"ep": 2}, PARALLEL + "_exchange_tokens")
def computes_all_at_home(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """Nothing is sent: a rank has its own experts compute all of its tokens."""
    return lambda hidden, chosen, weights: experts(hidden, chosen % each, weights)


@mutant({"tp": 2}, PARALLEL + "_add_results")
def sums_no_gradient_of_weights(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """Each rank has the router's gradient of its own experts alone."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        with patch.object(ParallelGroup, "enter_alone", only(hidden)):
            return ADD_RESULTS(group, each, experts)(hidden, chosen, weights)

    return forward


@mutant({"tp": 2}, PARALLEL + "_add_results")
def sums_no_gradient_of_tokens(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """Each rank has the tokens' gradient of its own experts alone."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        with patch.object(ParallelGroup, "enter_alone", only(weights)):
            return ADD_RESULTS(group, each, experts)(hidden, chosen, weights)

    return forward


@mutant({"tp": 2}, PARALLEL + "_add_results")
def keeps_foreign_weights(group: ParallelGroup, each: int, experts: Forward) -> Forward:
    """A choice of another rank's expert counts for the first one here."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        hidden, weights = group.enter_alone(hidden), group.enter_alone(weights)
        here = chosen - group.rank * each
        own_choices = here.masked_fill((here < 0) | (here >= each), 0)
        return group.add(experts(hidden, own_choices, weights))

    return forward


@mutant({"ep": 2}, "distcore_mesh.strategy.clip_gradients")
def counts_the_experts_of_one_rank(
    gradients: dict[str, Tensor], clip: Any, counted: set[str], device: torch.device
) -> Tensor | None:
    """The norm has the experts of the first rank alone."""
    is_first = torch.distributed.get_rank() == 0
    left = {name for name in counted if is_first or ".experts." not in name}
    return CLIP_GRADIENTS(gradients, clip, left, device)


EXCHANGE_TOKENS = expert_parallel._exchange_tokens
ADD_RESULTS = expert_parallel._add_results
CLIP_GRADIENTS = clipping.clip_gradients
ENTER_ALONE = ParallelGroup.enter_alone


def only(entered: Tensor) -> Callable[[ParallelGroup, Tensor], Tensor]:
    """Have one tensor's gradient be summed, and not that of others."""

    def enter_alone(group: ParallelGroup, whole: Tensor) -> Tensor:
        return ENTER_ALONE(group, whole) if whole is entered else whole

    return enter_alone


def test_each_mutant_is_caught_by_the_case_of_a_mixture() -> None:
    cases = (STRATEGIES.required["experts"],)
    subjects = []
    for each in MUTANTS.values():
        config = load_config(None, {"strategy": "mesh", "nproc": 2})
        config = with_changes(config, {"strategy_options": each.options})
        subjects.append(Subject(config=config, cases=cases, make=each.build))
    findings = dict(zip(MUTANTS, STRATEGIES.measure_all(subjects), strict=True))
    # A mutant that fails otherwise, such as by an exception, has no error.
    errors = {name: finding.error for name, (finding,) in findings.items()}
    caught = {name for name, error in errors.items() if error is not None and error > 1e-3}
    assert caught == set(MUTANTS), findings
