"""``muon``: torch's Muon for the matrices of hidden layers, AdamW for all other
parameters, as one optimizer.
"""

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


@dataclass(frozen=True, kw_only=True)
class Muon:
    """torch's Muon, which orthogonalizes the step, for the matrices of the model's repeated blocks;
    AdamW for the rest.

    The rest is embeddings, heads and all vectors.
    """

    elementwise: ClassVar = False
    exempt: ClassVar = {"two-ranks": "it orthogonalizes in bf16, which rounds some 1e-3 of a step"}

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Fraction of a weight that each step subtracts, per unit of learning rate;
    for Muon and AdamW.
    """
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon: part of the running mean of gradients that a step keeps."""
    nesterov: bool = True
    """Muon: look ahead along the momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Muon: Newton-Schulz iterations of the orthogonalization, in bf16."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon: how the rate depends on a matrix's shape; with match_rms_adamw one rate
    suits Muon and AdamW.
    """
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
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
        _say_once(shares(module, ours, others))
        settings: dict[str, Any] = {
            name: getattr(self, name) for name in ("momentum", "nesterov", "ns_steps")
        }
        muon = WholeMuon(ours, adjust_lr_fn=self.adjust_lr_fn, **settings)
        if not others:
            return Both(muon, None)
        return Both(
            muon, torch.optim.AdamW(others, betas=self.betas, eps=self.eps, fused=can_fuse(module))
        )


class WholeMuon(torch.optim.Muon):
    """torch's Muon, also for sharded matrices: each is gathered for its orthogonalization.

    Given DTensors, torch's Muon multiplies their shards and rounds the partial sums to bf16.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient."""
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)  # type: ignore[no-untyped-call]
        loss = closure and torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step_sharded(parameter, self.state[parameter], group)
        return loss


class Both(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer: one list of groups, and one state."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer | None) -> None:
        """Take over the groups of two new optimizers; ``None``: there is nothing for AdamW."""
        self._inner = [muon] if adamw is None else [muon, adamw]
        self._cut = len(muon.param_groups)
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})
        # Not given above, which would add the settings of each to the groups of the other.
        self.defaults = {
            name: value for inner in self._inner for name, value in inner.defaults.items()
        }

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the parameters that have a gradient."""
        loss = closure and torch.enable_grad()(closure)()
        for inner, groups in zip(
            self._inner,
            (self.param_groups[: self._cut], self.param_groups[self._cut :]),
            strict=False,
        ):
            inner.param_groups, inner.state = (
                groups,
                self.state,
            )  # each time, since loading a state replaces both in this object
            inner.step()
        return loss


def shares(module: nn.Module, ours: list[ParameterGroup], others: list[ParameterGroup]) -> str:
    """Return the line about which part of the trained parameters Muon steps and which
    AdamW, by kind of module.
    """
    kinds = {
        p: type(layer).__name__
        for layer in module.modules()
        for p in layer.parameters(recurse=False)
    }
    sizes_of = [Counter[str](), Counter[str]()]
    for sizes, groups in zip(sizes_of, (ours, others), strict=True):
        for parameter in (p for group in groups for p in group["params"]):
            sizes[kinds.get(parameter, "own")] += parameter.numel()
    whole = sum(sizes.total() for sizes in sizes_of) or 1
    parts = [
        f"{name} steps {sizes.total() / whole:.1%} of the trained parameters "
        f"({', '.join(f'{kind} {size / whole:.1%}' for kind, size in sizes.most_common())})"
        for name, sizes in zip(("muon", "adamw"), sizes_of, strict=True)
        if sizes
    ]
    return "; ".join(parts)


@cache
def _say_once(line: str) -> None:
    """Log ``line`` the first time in this process: a planner, or a frozen model, asks again."""
    log.info("%s", line)


def _divide(
    groups: list[ParameterGroup], matrices: set[nn.Parameter]
) -> tuple[list[ParameterGroup], list[ParameterGroup]]:
    """Divide each group in two: the matrices and the others. An empty half is dropped.

    A group's own ``eps`` is AdamW's: that of Muon, which bounds a norm of a whole
    matrix, is no option.
    """
    halves: tuple[list[ParameterGroup], list[ParameterGroup]] = ([], [])
    for group in groups:
        for half, wanted in zip(halves, (True, False), strict=True):
            if chosen := [p for p in group["params"] if (p in matrices) == wanted]:
                own = {name: value for name, value in group.items() if name != "eps" or not wanted}
                half.append(own | {"params": chosen})
    return halves


def _step_sharded(parameter: DTensor, state: dict[str, Any], group: ParameterGroup) -> None:
    """Step like torch's Muon: momentum and weights shard by shard,
    orthogonalization of the whole matrix.
    """
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    if not state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
    direction = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
    whole = nn.Parameter(torch.zeros(parameter.shape, dtype=gradient.dtype, device=gradient.device))
    whole.grad = cast(DTensor, direction).full_tensor()
    more = {
        name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    }
    inner = torch.optim.Muon([whole], weight_decay=0.0, momentum=0.0, nesterov=False, **more)
    # starting from zero, the weights are the step itself
    inner.step()  # type: ignore[no-untyped-call]
    mesh = parameter.device_mesh
    step = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(step.redistribute(placements=parameter.placements))
