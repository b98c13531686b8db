"""What stands in a model for the parts that other stages of a pipeline hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore import StrategyError


class Absent(nn.Module):
    """Stands where a block of another stage was, and takes the hidden state through in the form that the block gave it.

    Its first call runs the block itself, on zeros, to see that form.
    """

    def __init__(self, block: nn.Module, exchange: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        """Stand for ``block``; ``exchange`` maps hidden state, and dtype of the block's output, to what goes on."""
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if isinstance(value, str | int | float)}
        vars(self).update({name: value for name, value in plain.items() if name not in vars(self)})
        self._block = [block]  # in a list, and so no submodule: it has no parameters of the model here
        self._exchange = exchange
        self._form: tuple[torch.dtype, int | None] | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the block would return, with the hidden state that goes on."""
        hidden = inputs[0] if inputs else next(iter(named.values()))
        if self._form is None:
            block = self._block.pop()
            modes = {module: module.training for module in block.modules()}
            with torch.no_grad():
                block.eval()  # draws no random numbers, which would shift later ones
                self._form = _form_of(block(*inputs, **named), hidden)
            for module, mode in modes.items():  # it may be a block of this rank, absent in the pass of another chunk
                module.training = mode
        dtype, others = self._form
        passed = self._exchange(hidden, dtype)
        return passed if others is None else (passed, *(None for _ in range(others)))


def _form_of(output: Any, hidden: Tensor) -> tuple[torch.dtype, int | None]:
    """Return the dtype of a block's hidden state, and how many values follow it; ``None``: it is not in a tuple."""
    first = output[0] if isinstance(output, tuple) else output
    others = output[1:] if isinstance(output, tuple) else ()
    if not isinstance(first, Tensor) or first.shape != hidden.shape or any(other is not None for other in others):
        raise StrategyError(
            "strategy 'mesh': with pp blocks must take a hidden state and return one of its shape alone"
        )
    return first.dtype, len(others) if isinstance(output, tuple) else None


def hollow(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace a module's own parameters by zeros that take no memory and are none of the model's parameters."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            del module._parameters[name]
            vars(module)[name] = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
    if isinstance(module, nn.Linear):
        vars(module)["forward"] = partial(_one_row, module)


def hollow_twin(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a hollow module beside ``module``: it has its children, its buffers, and the hooks that it has so far."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name not in ("_modules", "_buffers"):
            vars(twin)[name] = value.copy()
    hollow(twin, dtype, device)
    return twin


def _one_row(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """The zeros that a layer without weights gives, in their shape and dtype, for the cost of one row."""
    row = nn.functional.linear(inputs.detach().reshape(-1, inputs.shape[-1])[:1], linear.weight, linear.bias)
    return (
        row[0].expand(*inputs.shape[:-1], row.shape[-1]) if len(row) else row.reshape(*inputs.shape[:-1], row.shape[-1])
    )
