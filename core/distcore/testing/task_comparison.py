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
        # In a tuple, so that it is no submodule: a loss would find its parameters here.
        self._inner = (inner,)
        self._copies = {name: value.detach().clone() for name, value in inner.named_buffers()}
        # Tied parameters come once, under their first name.
        for name, value in inner.named_parameters():
            copy = value.detach().clone()
            self._copies[name] = copy.requires_grad_(value.is_floating_point())

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
    gradients = (parameter.grad for parameter in model.parameters())
    parts = [gradient.reshape(-1) for gradient in gradients if gradient is not None]
    return torch.cat(parts) if parts else torch.zeros(1)


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, as a part of the largest value where
    that is above 1.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    actual = actual.double()
    expected = expected.double()
    scale = max(1.0, float(expected.abs().max()))
    return float((actual - expected).abs().max()) / scale


def same(first: Tensor | Ragged, second: Tensor | Ragged) -> bool:
    """Return True if two outputs are equal bit for bit."""
    if isinstance(first, Ragged) and isinstance(second, Ragged):
        has_same_lengths = torch.equal(first.lengths, second.lengths)
        return has_same_lengths and torch.equal(first.values, second.values)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return False


def differing_weights(model: nn.Module, values: WeightStream, whole: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that ``whole`` has otherwise, in values
    or in what shares them.

    ``model`` is on the meta device, with its buffers; ``values`` are those of its parameters.
    """
    parameters = dict(model.named_parameters())
    expected_parameters = dict(whole.named_parameters())
    differing = parameters.keys() ^ expected_parameters.keys()
    for name, value in values(lambda name: (0, parameters[name].numel())):
        if name not in expected_parameters:
            continue
        expected = expected_parameters[name].detach().reshape(-1)
        if not torch.equal(value.to(expected.dtype), expected):
            differing.add(name)
    buffers = dict(model.named_buffers())
    for name, value in whole.named_buffers():
        if name not in buffers or not torch.equal(buffers[name], value):
            differing.add(name)
    return sorted(differing)


def count_differing(first: Any, second: Any) -> int:
    """Return how many leaves of two batches differ."""
    first_leaves = _leaves(first)
    second_leaves = _leaves(second)
    if len(first_leaves) != len(second_leaves):
        return max(len(first_leaves), len(second_leaves))
    pairs = zip(first_leaves, second_leaves, strict=True)
    return sum(not np.array_equal(leaf, other) for leaf, other in pairs)


def _leaves(batch: Any) -> list[Any]:
    """Return the values in the containers of a batch; tensors as arrays."""
    from torch.utils._pytree import tree_leaves

    leaves = []
    for leaf in tree_leaves(batch):
        leaves.append(leaf.detach().numpy() if isinstance(leaf, Tensor) else leaf)
    return leaves
