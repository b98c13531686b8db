"""Memory of a strategy before a run: bytes of parameters, gradients, optimizer; and traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore.config import RunConfig
    from distcore.plugin.strategy.contract import OptimizerFactory, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the rank that holds most, when a step that is not the first is about to be taken.

    All but ``host`` is memory of the device that computes. Activations are left out.
    """

    parameters: int
    """Parameters of the model, frozen ones included, or this rank's shards of them."""
    gradients: int
    """Gradients, or this rank's shards of them."""
    optimizer: int
    """Optimizer state."""
    copies: int = 0
    """A second copy of the parameters, which the optimizer steps: fp32 master weights."""
    buffers: int = 0
    """Buffers of collectives, such as gathered parameters and buckets. Most are in use
    only during a pass.
    """
    starting: int = 0
    """Peak bytes in addition to the parameters, while the model is built and wrapped."""
    host: int = 0
    """Bytes of the above that are offloaded to main memory."""
    sent: int | None = 0
    """Bytes that each rank sends over a ring once per optimizer step; ``None``: unknown."""
    sent_each: int = 0
    """Additional bytes that each rank sends over a ring in each micro-batch."""

    @property
    def states(self) -> int:
        """Parameters, gradients, optimizer state and copies together."""
        return self.parameters + self.gradients + self.optimizer + self.copies

    @property
    def stepped(self) -> int:
        """The optimizer's state, and the copies that it steps."""
        return self.optimizer + self.copies


@runtime_checkable
class PlansMemory(Protocol):
    """A strategy that knows memory and traffic of each rank before a run, for ``distcore plan``."""

    def plan_memory(
        self, config: RunConfig, meta_model: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return the memory of the fullest of ``ranks`` ranks, without processes or weights.

        ``config`` is resolved. ``meta_model`` is the model on the meta device; its frozen
        parameters do not require gradients. ``wrap_model`` gets the same ``make_optimizer``.
        ``distcore.footprint`` has what most strategies need. Raises DistcoreError, one line, for
        settings that the strategy cannot plan.
        """


@runtime_checkable
class TracesStep(Protocol):
    """A strategy whose step ``distcore plan`` can trace on tensors without values."""

    def traced(self) -> object:
        """Return a strategy that holds the same tensors at the same time: itself, or a stand-in.

        ``distcore plan`` calls its ``wrap_model``, ``accumulate``, ``backward`` and ``step`` in one
        process, which is rank 0 of the planned world. torch's collectives return at once and send
        nothing; the strategy must not call collectives of other libraries. The stand-in may
        implement ``HoldsExtraTensors``.
        """


@runtime_checkable
class HoldsExtraTensors(Protocol):
    """A strategy from ``traced`` whose library keeps tensors outside the module and the optimizer.

    One whole step runs before the traced one, because such a library may allocate more than
    optimizer state in it.
    """

    most_ranks: ClassVar[int]
    """Largest world size that can be traced.

    For a larger world, states come from ``plan_memory`` and the rest from a trace at this size.
    """

    def extra_tensors(self, run: Run) -> Mapping[str, Iterable[Tensor]]:
        """Return the tensors outside module and optimizer, at the time of the optimizer step.

        They are listed by purpose: ``parameters``, ``gradients``, ``optimizer``. Copies of weights
        that the optimizer steps belong to ``optimizer``.
        """

    def close(self) -> None:
        """Undo the changes of ``wrap_model`` to the process."""
