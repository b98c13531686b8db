"""Replace the parts of a model that other pipeline stages hold by placeholders without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore import StrategyError


class OnOtherStageError(StrategyError, AttributeError):
    """A block of another stage was asked for a part of it."""


class StagePlaceholder(nn.Module):
    """Replaces a block of another stage, and passes the hidden state on in the
    form of the block's output.

    The first call runs the block itself, on zeros, to learn the form of its output.
    """

    def __init__(self, block: nn.Module, exchange: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        """Replace ``block``. ``exchange`` maps its input and the dtype of its output to
        the next hidden state.
        """
        super().__init__()
        plain = {
            name: value
            for name, value in vars(block).items()
            if isinstance(value, str | int | float)
        }
        vars(self).update({name: value for name, value in plain.items() if name not in vars(self)})
        # in a list, so that it is no submodule and adds no parameters to the model
        self._block = [block]
        self._exchange = exchange
        self._form: tuple[torch.dtype, int | None] | None = None

    def __getattr__(self, name: str) -> Any:
        """Refuse what the block has and this rank has not, in one line; whoever asks
        with ``hasattr`` hears no.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise OnOtherStageError(
                f"strategy 'mesh': with pp {name!r} of a block is on the ranks of another stage"
                " alone; forward may only call the block"
            ) from None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the block's form of output, with the hidden state that ``exchange`` gives."""
        hidden = inputs[0] if inputs else next(iter(named.values()))
        if self._form is None:
            block = self._block.pop()
            modes = {module: module.training for module in block.modules()}
            with torch.no_grad():
                block.eval()  # draws no random numbers, which would shift later ones
                self._form = _form_of(block(*inputs, **named), hidden)
            # the block may be this rank's own, replaced in another chunk's pass
            for module, mode in modes.items():
                module.training = mode
        dtype, others = self._form
        output = self._exchange(hidden, dtype)
        return output if others is None else (output, *(None for _ in range(others)))


def _form_of(output: Any, hidden: Tensor) -> tuple[torch.dtype, int | None]:
    """Return the dtype of a block's hidden state, and the number of values after it; ``None``
    if it is no tuple.
    """
    first = output[0] if isinstance(output, tuple) else output
    others = output[1:] if isinstance(output, tuple) else ()
    if (
        not isinstance(first, Tensor)
        or first.shape != hidden.shape
        or any(other is not None for other in others)
    ):
        raise StrategyError(
            "strategy 'mesh': with pp blocks must take a hidden state and return one of its shape"
            " alone"
        )
    return first.dtype, len(others) if isinstance(output, tuple) else None


def make_zero_storage(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace a module's own parameters by zeros without memory, which are no
    parameters of the model.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            del module._parameters[name]
            vars(module)[name] = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
    if isinstance(module, nn.Linear):
        vars(module)["forward"] = partial(_zero_output, module)


def zero_storage_copy(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a copy of ``module`` with zero-storage parameters, and its children,
    buffers and present hooks.
    """
    duplicate = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name not in ("_modules", "_buffers"):
            vars(duplicate)[name] = value.copy()
    make_zero_storage(duplicate, dtype, device)
    return duplicate


def _zero_output(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Return the output of a layer with zero weights, in its shape and dtype, for the
    cost of one row.
    """
    row = nn.functional.linear(
        inputs.detach().reshape(-1, inputs.shape[-1])[:1], linear.weight, linear.bias
    )
    return (
        row[0].expand(*inputs.shape[:-1], row.shape[-1])
        if len(row)
        else row.reshape(*inputs.shape[:-1], row.shape[-1])
    )
