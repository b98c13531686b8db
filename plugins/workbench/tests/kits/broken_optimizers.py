"""Optimizers that are broken on purpose; a class names the case that must notice."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn


class Descent(torch.optim.Optimizer):
    """Momentum with decoupled weight decay; each broken optimizer replaces one part."""

    def __init__(self, params: list[dict[str, Any]]) -> None:
        super().__init__(params, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := self.gradient_of(parameter)) is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter, requires_grad=False))
                    state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
                    parameter.mul_(1 - self.rate(group) * self.decay(group))
                    parameter.add_(self.direction(parameter, state), alpha=-self.rate(group))

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])

    def decay(self, group: dict[str, Any]) -> float:
        return float(group["weight_decay"])

    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return state["mean"]


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Keeps every law."""

    case: ClassVar = ""
    elementwise: ClassVar = True
    made: ClassVar[type[Descent]] = Descent

    weight_decay: Annotated[float, Field(ge=0)] = 0.0

    def build(self, module: nn.Module, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.made(groups)


class Ascent(Descent):
    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return -state["mean"]


class Uphill(Sound):
    case = "goes-down"
    made = Ascent


class FirstRate(Descent):
    def __init__(self, params: list[dict[str, Any]]) -> None:
        super().__init__(params)
        self.first = [group["lr"] for group in self.param_groups]

    def rate(self, group: dict[str, Any]) -> float:
        return float(self.first[next(i for i, one in enumerate(self.param_groups) if one is group)])


class RemembersTheRate(Sound):
    case = "rate-of-each-step"
    made = FirstRate


class OneRate(Descent):
    def rate(self, group: dict[str, Any]) -> float:
        return float(self.param_groups[0]["lr"])


class RateOfTheFirstGroup(Sound):
    case = "rate-of-each-group"
    made = OneRate


class OneDecay(Descent):
    def decay(self, group: dict[str, Any]) -> float:
        return max(float(other["weight_decay"]) for other in self.param_groups)


class DecaysBiases(Sound):
    case = "decay-of-each-group"
    made = OneDecay


class NoDecay(Descent):
    def decay(self, group: dict[str, Any]) -> float:
        return 0.0


class DecaysNothing(Sound):
    case = "decay-of-each-group"
    made = NoDecay


class Normed(Descent):
    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        every = [
            p.grad.norm()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return (
            None if parameter.grad is None else torch.div(parameter.grad, torch.stack(every).norm())
        )


class NormOfAll(Sound):
    case = "parameters-apart"
    made = Normed


class Zeroed(Descent):
    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class StateForAll(Sound):
    case = "unused-stay"
    made = Zeroed


class Divided(Descent):
    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return state["mean"] / state["mean"].abs().sqrt()


class DividesByZero(Sound):
    case = "finite-without-gradient"
    made = Divided


class Scaled(Descent):
    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return state["mean"].mul(float(parameter.norm()))


class CallsItselfElementwise(Sound):
    case = "slices-alike"
    made = Scaled


class Divides(Descent):
    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return state["mean"] / int(os.environ.get("WORLD_SIZE", "1"))


class MeanOfTheMean(Sound):
    case = "two-ranks"
    made = Divides


class Noisy(Descent):
    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return state["mean"] + 1e-3 * torch.randn_like(parameter)


class DrawsFromTheRun(Sound):
    case = "same-again"
    made = Noisy


class Counting(Descent):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        super().step()

    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        return state["mean"] / self.steps


class CountsBesideTheState(Sound):
    case = "continues"
    made = Counting


class Appending(Descent):
    def direction(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> Tensor:
        before = state.get("history", torch.zeros(0))
        state["history"] = torch.cat([before, parameter.norm()[None]])
        return state["mean"]


class KeepsAHistory(Sound):
    case = "state-of-one-size"
    made = Appending


@dataclass(frozen=True, kw_only=True)
class TakesNan(Sound):
    case = "options-are-checked"

    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class TakesAnything(Sound):
    case = "options-are-checked"

    momentum: Any = 0.9


class NeedlesslyExempt(Sound):
    exempt: ClassVar = {"goes-down": "for no reason"}
