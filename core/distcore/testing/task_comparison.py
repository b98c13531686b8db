"""Compare batches, outputs and gradients in the cases of a task, and detect uses of a
model other than calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore.plugin.strategy.contract import WeightStream
from distcore.plugin.task.ragged import Ragged


class Launcher(nn.Module):
    """A model whose calls compute with copies of the parameters, so that any other
    use of them shows.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.calls = 0
        # in a tuple, so that it is no submodule, whose parameters could be found here
        self._inner = (inner,)
        self._copies = {name: value.detach().clone() for name, value in inner.named_buffers()}
        for name, value in inner.named_parameters():  # of tied ones the first name
            self._copies[name] = value.detach().clone().requires_grad_(value.is_floating_point())

    def gradient(self, name: str) -> Tensor | None:
        """Return the gradient of a parameter's copy."""
        return self._copies[name].grad

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute like the model."""
        self.calls += 1
        return torch.func.functional_call(
            self._inner[0], self._copies, args, kwargs, tie_weights=True
        )


class AlwaysTraining(nn.Module):
    """A wrapper that says that it trains, whatever it is told, as some engines do; its
    model does as told.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute like the model."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> AlwaysTraining:
        """Tell the model alone."""
        self.module.train(mode)
        return self


def gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters that have one, in one row."""
    parts = [
        parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None
    ]
    return torch.cat(parts) if parts else torch.zeros(1)


def largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, as a part of the largest value where
    that is above 1.
    """
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    scale = max(1.0, float(other.double().abs().max()))
    return float((one.double() - other.double()).abs().max()) / scale


def same(one: Tensor | Ragged, other: Tensor | Ragged) -> bool:
    """Return True if two outputs are equal bit for bit."""
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return torch.equal(one.lengths, other.lengths) and torch.equal(one.values, other.values)
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def differing_weights(model: nn.Module, values: WeightStream, whole: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that ``whole`` has otherwise, in values
    or in what shares them.

    ``model`` is on the meta device, with its buffers; ``values`` are those of its parameters.
    """
    parameters, expected = dict(model.named_parameters()), dict(whole.named_parameters())
    differing = parameters.keys() ^ expected.keys()
    for name, value in values(lambda name: (0, parameters[name].numel())):
        whole_value = expected.get(name)
        if whole_value is not None and not torch.equal(
            value.to(whole_value.dtype), whole_value.detach().reshape(-1)
        ):
            differing.add(name)
    buffers = dict(model.named_buffers())
    for name, value in whole.named_buffers():
        if name not in buffers or not torch.equal(buffers[name], value):
            differing.add(name)
    return sorted(differing)


def count_differing(one: Any, other: Any) -> int:
    """Return how many leaves of two batches differ."""
    from torch.utils._pytree import tree_leaves

    mine, others = (
        [leaf.detach().numpy() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(batch)]
        for batch in (one, other)
    )
    if len(mine) != len(others):
        return max(len(mine), len(others))
    return sum(not np.array_equal(a, b) for a, b in zip(mine, others, strict=True))
