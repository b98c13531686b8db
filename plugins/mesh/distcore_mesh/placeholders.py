"""Replace the parts of a model that other pipeline stages hold by placeholders without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore import StrategyError
from distcore_mesh.experts import is_experts


class OnOtherStageError(StrategyError, AttributeError):
    """A block of another stage was asked for a part of it."""


class StagePlaceholder(nn.Module):
    """Replaces a block of another stage; passes the hidden state on in the block's output's form.

    The first call runs the block itself, on zeros, to learn the form of its output.
    """

    def __init__(self, block: nn.Module, exchange: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        """Replace ``block``.

        ``exchange`` maps the block's input and the dtype of its output to the next hidden state.
        """
        super().__init__()
        attributes = vars(self)
        for name, value in vars(block).items():
            if isinstance(value, str | int | float):
                attributes.setdefault(name, value)
        # In a list, so that it is no submodule and adds no parameters to the model.
        self._block = [block]
        self._exchange = exchange
        self._form: tuple[torch.dtype, int | None] | None = None

    @property
    def has_unknown_form(self) -> bool:
        """True before the first call, which runs the block."""
        return self._form is None

    def __getattr__(self, name: str) -> Any:
        """Raise OnOtherStageError for attributes of the block, which ``hasattr`` reads as False."""
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
                # In evaluation it draws no random numbers, which would shift later ones.
                block.eval()
                allocate_zeros(block)
                self._form = _form_of(block(*inputs, **named), hidden)
            # The block may be this rank's own, replaced in another chunk's pass.
            for module, mode in modes.items():
                module.training = mode
        dtype, others = self._form
        output = self._exchange(hidden, dtype)
        if others is None:
            return output
        return (output, *[None] * others)


def _form_of(output: Any, hidden: Tensor) -> tuple[torch.dtype, int | None]:
    """Return the dtype of a block's hidden state, and the number of values after it.

    The number is ``None`` if the output is no tuple.
    """
    is_tuple = isinstance(output, tuple)
    first, *others = output if is_tuple else (output,)
    is_hidden_state = isinstance(first, Tensor) and first.shape == hidden.shape
    is_alone = all(other is None for other in others)
    if not is_hidden_state or not is_alone:
        raise StrategyError(
            "strategy 'mesh': with pp blocks must take a hidden state and return one of its shape"
            " alone"
        )
    return first.dtype, len(others) if is_tuple else None


def make_zero_storage(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace a module's own parameters by zeros without memory.

    The zeros are no parameters of the model.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            del module._parameters[name]
            zero = torch.zeros((), dtype=dtype, device=device)
            vars(module)[name] = zero.expand(parameter.shape)
    if isinstance(module, nn.Linear):
        vars(module)["forward"] = partial(_zero_output, module)
    if is_experts(module):
        # Their kernels refuse such weights, and no rank expects the tokens that they would send.
        vars(module)["forward"] = _zero_experts


def allocate_zeros(block: nn.Module) -> None:
    """Give the zeros of ``make_zero_storage`` memory where a block may need it.

    Kernels, such as a grouped product over experts, refuse weights without strides.
    """
    for module in block.modules():
        attributes = vars(module)
        if isinstance(module, nn.Linear):
            # It computes without its weights; a block may write to its output in place.
            if "forward" in attributes:
                attributes["forward"] = partial(_zero_output, module, has_memory=True)
            continue
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                attributes[name] = value.contiguous()


def zero_storage_copy(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a copy of ``module`` with zero-storage parameters.

    It has the children and buffers of ``module``, and the hooks that there are now.
    """
    duplicate = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name not in ("_modules", "_buffers"):
            vars(duplicate)[name] = value.copy()
    make_zero_storage(duplicate, dtype, device)
    return duplicate


def _zero_experts(hidden: Tensor, *_choices: Tensor) -> Tensor:
    """Return the output of experts with zero weights."""
    return torch.zeros_like(hidden)


def _zero_output(linear: nn.Linear, inputs: Tensor, has_memory: bool = False) -> Tensor:
    """Return the output of a layer with zero weights, in its shape and dtype.

    It costs what one row does, also in memory unless ``has_memory``.
    """
    first_row = inputs.detach().reshape(-1, inputs.shape[-1])[:1]
    output = nn.functional.linear(first_row, linear.weight, linear.bias)
    shape = (*inputs.shape[:-1], output.shape[-1])
    if len(output) == 0:  # there are no inputs
        return output.reshape(shape)
    expanded = output[0].expand(shape)
    return expanded.contiguous() if has_memory else expanded
