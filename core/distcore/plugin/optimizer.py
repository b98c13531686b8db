"""What an optimizer of the group ``distcore.optimizers`` is: options, and how it is built from parameter groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

ParameterGroup = dict[str, Any]
"""Parameters that are stepped alike, as torch's optimizers take them: ``params``, ``lr`` and, where the optimizer has
such an option, ``weight_decay``, which is 0 for biases and normalization weights."""


class BuildsOptimizer(Protocol):
    """A frozen dataclass whose fields are the optimizer's options: ``optimizer.NAME`` in a config."""

    elementwise: ClassVar[bool]
    """Whether the step of an element depends on nothing but this element, its gradients and the number of steps.

    Then it is the same for a slice of a parameter, and strategies that spread parameters over ranks take it.
    """

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> Optimizer:
        """Return the optimizer of ``groups``, which hold the trained parameters of ``module``.

        What it keeps of a parameter, in ``Optimizer.state``, must be tensors, so that checkpoints have it.
        """
        ...
