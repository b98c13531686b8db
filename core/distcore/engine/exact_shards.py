"""The gradient of a step under ``exact`` where a strategy shards parameters.

The strategy's own backward pass adds it up, over blocks and over ranks, and leaves each rank its
shards. Hooks on the gathered parameters, which that pass computes the gradients of, make its sums
exact: each block's gradient is rounded to the grid, and kept in fp64 from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distcore.distributed.dtensors import gathered_parameters
from distcore.engine.grid import FINEST, round_to_grid
from distcore.plugin.strategy.contract import MicroBatch, Run
from distcore.plugin.strategy.hooks import Hooks


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """What is known of a block whose gradients were added up."""

    loss: Tensor
    """Its share of the mean loss."""
    greatest: Tensor | float
    """The largest absolute element of its gradients; NaN if there is one."""
    used: list[bool]
    """For each parameter of the sums: True if it has a gradient."""


class ShardedSums:
    """The gradient of a step, added up by the strategy; no rank has it whole."""

    needs_padding = True
    """Each rank must run as many passes as the others: they gather parameters in theirs."""
    parameter_count = 0
    """Which parameters are used, the strategy's ranks agree on without being told."""

    def __init__(self) -> None:
        """Begin without parameters; those of a run are told to ``watch``."""
        self._bits = FINEST
        self._bounds: list[Tensor] = []
        self._watched: set[int] = set()

    def watch(self, run: Run) -> None:
        """Round and widen the gradients of all parameters that are trained now; every rank calls.

        Phases train some each, and a gradient must not be rounded twice.
        """
        for parameter in gathered_parameters(run.module):
            if id(parameter) in self._watched:
                continue
            self._watched.add(id(parameter))
            parameter.grad_dtype = None  # else torch would keep ``grad`` in that of the parameter
            parameter.register_hook(self._round)  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(widen)  # type: ignore[no-untyped-call]

    def clear(self, run: Run) -> None:
        """Begin a step, or begin it anew."""
        for parameter in run.module.parameters():
            parameter.grad = None

    def add_block(
        self, run: Run, hooks: Hooks, micro: MicroBatch, loss: Callable[[], Tensor], bits: int
    ) -> AddedBlock:
        """Add the gradients of one block, rounded to multiples of ``2**-bits``."""
        self._bits = bits
        self._bounds = []
        with hooks.accumulate(run, micro.last):
            share = hooks.backward(run, loss())
        greatest = torch.stack(self._bounds).abs().max() if self._bounds else 0.0
        return AddedBlock(share, greatest, used=[])

    def reduce(self, run: Run, hooks: Hooks, used: list[bool]) -> None:
        """Do nothing: the last backward pass has added up the ranks' gradients."""

    def _round(self, gradient: Tensor) -> Tensor:
        """Return a block's gradient of one parameter on the grid, whose numbers fp32 has, too."""
        self._bounds += torch.aminmax(gradient)  # much faster than a norm
        return round_to_grid(gradient.double(), self._bits).to(gradient.dtype)


def widen(parameter: nn.Parameter) -> None:
    """Keep the first gradient of a step in fp64, so that torch adds the others to it there."""
    if parameter.grad is not None and parameter.grad.dtype != torch.float64:
        parameter.grad = parameter.grad.double()
