"""The interface of an optimizer, an entry point of ``distcore.optimizers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

ParameterGroup = dict[str, Any]
"""Parameters that are stepped alike, as torch's optimizers take them: ``params``, ``lr`` and, where
the optimizer has such an option, ``weight_decay``, which is 0 for biases and normalization weights.
"""


class BuildsOptimizer(Protocol):
    """A frozen dataclass whose fields are the optimizer's options:
    ``optimizer.NAME`` in a config.
    """

    elementwise: ClassVar[bool]
    """True if the step of an element depends only on the element, its gradients and
    the number of steps.

    A slice of a parameter then takes the same step, and strategies that shard
    parameters accept the optimizer.
    """

    def build(self, module: nn.Module, groups: list[ParameterGroup]) -> Optimizer:
        """Return the optimizer for ``groups``, the trained parameters of ``module``.

        Its state per parameter, in ``Optimizer.state``, must be tensors, so
        that checkpoints save it.
        """


@runtime_checkable
class HasSavedState(Protocol):
    """An optimizer of torch's kind whose state has another form in checkpoints, such as
    one of 8 bits.

    Any rank may then save or load any part of it.
    """

    def saved_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's values for the parameter, by key; a tensor of its shape is
        sharded as it is.
        """

    def load_saved_state(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        """Take over the result of ``saved_state`` for the parameter; the tensors
        may be on the CPU.
        """
