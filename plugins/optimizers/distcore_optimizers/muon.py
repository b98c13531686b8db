"""``muon``: torch's Muon for matrices of hidden layers and AdamW for the rest, as one optimizer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distcore import ConfigError, ParameterGroup
from distcore.model import can_fuse, hidden_matrices

log = logging.getLogger("distcore")

DecayRate = Annotated[float, Field(ge=0, lt=1)]
"""Part of a running mean that a step keeps."""


@dataclass(frozen=True, kw_only=True)
class Muon:
    """torch's Muon for the matrices of the model's repeated blocks, AdamW for the rest.

    Muon orthogonalizes the step. The rest is embeddings, heads and all vectors.
    """

    elementwise: ClassVar = False
    exempt: ClassVar = {"two-ranks": "it orthogonalizes in bf16, which rounds some 1e-3 of a step"}

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Fraction of a weight that each step of both subtracts, per unit of learning rate."""
    momentum: DecayRate = 0.95
    """Muon: part of the running mean of gradients that a step keeps."""
    nesterov: bool = True
    """Muon: look ahead along the momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Muon: Newton-Schulz iterations of the orthogonalization, in bf16."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: how the rate depends on a matrix's shape; match_rms_adamw: one rate suits both."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW: decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the denominator of the step, against division by zero."""

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
        """Return the optimizer; raises ConfigError for a model without trained repeated blocks."""
        matrices = hidden_matrices(module)
        ours, others = _divide(groups, matrices)
        if not ours:
            raise ConfigError(
                "optimizer.name = 'muon': no matrix to train in repeated blocks, as muon needs; use"
                " --optimizer adamw"
            )
        _log_once(shares(module, ours, others))
        muon = WholeMuon(
            ours,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn=self.adjust_lr_fn,
        )
        if not others:
            return Both(muon, None)
        fused = can_fuse(module)
        adamw = torch.optim.AdamW(others, betas=self.betas, eps=self.eps, fused=fused)
        return Both(muon, adamw)


class WholeMuon(torch.optim.Muon):
    """torch's Muon, also for sharded matrices: each is gathered for its orthogonalization.

    Given DTensors, torch's Muon multiplies their shards and rounds the partial sums to bf16.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient."""
        if not self._has_shards():
            return super().step(closure)  # type: ignore[no-untyped-call]
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step_sharded(parameter, self.state[parameter], group)
        return loss

    def _has_shards(self) -> bool:
        """Return True if ranks have parts of a parameter."""
        for group in self.param_groups:
            if any(isinstance(parameter, DTensor) for parameter in group["params"]):
                return True
        return False


class Both(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer: one list of groups, and one state."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer | None) -> None:
        """Take over the groups of two new optimizers; ``None``: there is nothing for AdamW."""
        self._inner = [muon] if adamw is None else [muon, adamw]
        self._muon_groups = len(muon.param_groups)
        groups = list(muon.param_groups)
        if adamw is not None:
            groups += adamw.param_groups
        super().__init__(groups, {})
        # Not passed to torch's __init__, which would add the settings of each optimizer to the
        # groups of the other.
        self.defaults = {}
        for inner in self._inner:
            self.defaults.update(inner.defaults)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient."""
        loss = closure and torch.enable_grad()(closure)()
        groups_of_muon = self.param_groups[: self._muon_groups]
        groups_of_adamw = self.param_groups[self._muon_groups :]
        # Not strict: without AdamW there is no second optimizer, and it has no groups.
        for inner, groups in zip(self._inner, (groups_of_muon, groups_of_adamw), strict=False):
            # Each time, since loading a state replaces both in this object.
            inner.param_groups = groups
            inner.state = self.state
            inner.step()
        return loss


def shares(module: nn.Module, ours: list[ParameterGroup], others: list[ParameterGroup]) -> str:
    """Return a line about the parts of the parameters that Muon and AdamW step, by kind of module.

    A part is a share of the elements of all trained parameters.
    """
    kinds: dict[nn.Parameter, str] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            kinds[parameter] = type(layer).__name__
    sizes_by_optimizer = {"muon": _sizes(ours, kinds), "adamw": _sizes(others, kinds)}
    # At least 1: a module may have parameters without elements only.
    total = sum(sizes.total() for sizes in sizes_by_optimizer.values()) or 1

    phrases = []
    for name, sizes in sizes_by_optimizer.items():
        if not sizes:
            continue
        share = f"{sizes.total() / total:.1%}"
        by_kind = ", ".join(f"{kind} {size / total:.1%}" for kind, size in sizes.most_common())
        phrases.append(f"{name} steps {share} of the trained parameters ({by_kind})")
    return "; ".join(phrases)


def _sizes(groups: list[ParameterGroup], kinds: dict[nn.Parameter, str]) -> Counter[str]:
    """Return the number of elements of the groups' parameters by kind of module."""
    sizes = Counter[str]()
    for group in groups:
        for parameter in group["params"]:
            sizes[kinds.get(parameter, "own")] += parameter.numel()
    return sizes


@cache
def _log_once(line: str) -> None:
    """Log ``line`` the first time in this process: a planner, or a frozen model, asks again."""
    log.info("%s", line)


def _divide(
    groups: list[ParameterGroup], matrices: set[nn.Parameter]
) -> tuple[list[ParameterGroup], list[ParameterGroup]]:
    """Return the groups of Muon, which have the matrices, and those of AdamW, with the others.

    A group without parameters is dropped.
    """
    ours: list[ParameterGroup] = []
    others: list[ParameterGroup] = []
    for group in groups:
        in_matrices = [p for p in group["params"] if p in matrices]
        elsewhere = [p for p in group["params"] if p not in matrices]
        if in_matrices:
            # A group's eps is AdamW's: that of Muon, which bounds a norm of a whole matrix, is no
            # option.
            settings = {name: value for name, value in group.items() if name != "eps"}
            ours.append(settings | {"params": in_matrices})
        if elsewhere:
            others.append(group | {"params": elsewhere})
    return ours, others


def _step_sharded(parameter: DTensor, state: dict[str, Any], group: ParameterGroup) -> None:
    """Step like torch's Muon, but orthogonalize the whole matrix.

    Momentum and weights are updated shard by shard.
    """
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    if not state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    momentum = group["momentum"]
    mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    direction = gradient.lerp(mean, momentum) if group["nesterov"] else mean
    zeros = torch.zeros(parameter.shape, dtype=gradient.dtype, device=gradient.device)
    whole = nn.Parameter(zeros)
    whole.grad = cast(DTensor, direction).full_tensor()
    names = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    settings = {name: group[name] for name in names}
    # Momentum and decay act on the shards, before and after.
    inner = torch.optim.Muon([whole], weight_decay=0.0, momentum=0.0, nesterov=False, **settings)
    # The weights are the step itself, since they start from zero.
    inner.step()  # type: ignore[no-untyped-call]
    mesh = parameter.device_mesh
    step = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(step.redistribute(placements=parameter.placements))
