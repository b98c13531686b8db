"""The handle through which a task makes a step itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class Step(Protocol):
    """One optimizer step under the strategy; every rank calls the same methods in order."""

    @property
    def micro_batches(self) -> range:
        """Numbers of this rank's micro-batches; every rank has equally many."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name: whole, or this rank's shards as DTensors."""

    def forward(self, number: int, loss: Callable[..., Any] | None = None) -> Tensor:
        """Return a micro-batch's share of the mean loss over the global batch.

        ``loss`` replaces the task's. Each pass over all micro-batches draws the same dropout.
        """

    def backward(self, share: Tensor) -> Tensor:
        """Add the gradients of the share that ``forward`` returned last; return it detached.

        After the last micro-batch every rank has the gradients of the global batch.
        """

    def gradients(self, loss: Callable[..., Any] | None = None) -> Tensor:
        """Compute the gradients of the mean loss over the global batch; return this rank's share.

        Runs ``zero``, and ``forward`` and ``backward`` over all micro-batches.
        """

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of all ``tensors`` together, such as gradients, over all ranks."""

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter, empty before the first ``apply``.

        A task may keep tensors of the parameter's shape in it; checkpoints save them.
        """

    def apply(self) -> None:
        """Clip the gradients, step the optimizer, and clear the gradients."""

    def zero(self) -> None:
        """Clear the gradients."""
