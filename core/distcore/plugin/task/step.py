"""The handle of a step that a task makes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class Step(Protocol):
    """One optimizer step under the strategy. Every rank must call the same methods in the same order."""

    @property
    def micro_batches(self) -> range:
        """Numbers of this rank's micro-batches: as many on every rank."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name: whole, or this rank's shards as DTensors."""
        ...

    def forward(self, number: int, loss: Callable[..., Any] | None = None) -> Tensor:
        """Return a micro-batch's share of the mean loss over the global batch.

        ``loss`` replaces the task's. A pass from the first micro-batch to the last draws the same dropout each time.
        """
        ...

    def backward(self, share: Tensor) -> Tensor:
        """Add the gradients of the share that ``forward`` returned last; return it detached.

        After the last micro-batch the gradients are those of the global batch, on every rank.
        """
        ...

    def gradients(self, loss: Callable[..., Any] | None = None) -> Tensor:
        """Set the gradients to those of the mean loss over the global batch; return this rank's share of it.

        Runs ``zero``, and ``forward`` and ``backward`` over all micro-batches.
        """
        ...

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the L2 norm of all ``tensors`` together, such as gradients, over all ranks."""
        ...

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state of a parameter, to keep tensors of its shape in; checkpoints save it.

        Empty before the first ``apply``: an optimizer begins with an empty one.
        """
        ...

    def apply(self) -> None:
        """Clip the gradients, step the optimizer, and clear the gradients."""
        ...

    def zero(self) -> None:
        """Clear the gradients."""
        ...
