"""What a strategy says of memory before a run: bytes of parameters, gradients and optimizer state, and traffic."""

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
    """Bytes of the rank that holds most, at the moment when the optimizer is about to take a step, but not its first.

    All but ``host`` is memory of the device that computes. Activations are left out.
    """

    parameters: int
    """The parameters that the model computes with, or this rank's shards of them; frozen ones, too."""
    gradients: int
    """Their gradients, or what this rank keeps of them."""
    optimizer: int
    """What the optimizer keeps from step to step."""
    copies: int = 0
    """A second copy of the parameters, which is what the optimizer steps: fp32 master weights."""
    buffers: int = 0
    """Room for collectives, most of which is in use during a pass and not at that moment: what is gathered, buckets."""
    host: int = 0
    """What is offloaded to main memory, whatever of the above it is."""
    sent: int | None = 0
    """Bytes that each rank sends over a ring once per optimizer step; ``None``: it is not known what ranks send."""
    sent_each: int = 0
    """Bytes that each rank sends over a ring in each micro-batch, beside these."""

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
    """A strategy that knows, before a run, what each rank holds and sends. ``distcore plan`` asks it."""

    def plan_memory(
        self, config: RunConfig, skeleton: nn.Module, ranks: int, make_optimizer: OptimizerFactory
    ) -> Memory:
        """Return what the rank with most holds of ``ranks`` ranks; nothing may be started, and no weight be built.

        ``config`` is resolved. ``skeleton`` is the model on the meta device, its frozen parameters without
        ``requires_grad``. ``make_optimizer`` is what ``wrap_model`` gets. ``distcore.footprint`` has what most
        strategies need. Raises DistcoreError, one line, for what it does not know.
        """
        ...


@runtime_checkable
class TracesStep(Protocol):
    """A strategy whose step ``distcore plan`` can trace on tensors without values, in one process."""

    def traced(self) -> object:
        """Return a strategy that holds the same tensors at the same time as this one: itself, or a stand-in for it.

        Of its hooks ``wrap_model``, ``accumulate``, ``backward`` and ``step`` are called, in the first of as many ranks
        as are planned for. Collectives of torch return at once and send nothing; those of other libraries are none. It
        may be one that ``HoldsApart``.
        """
        ...


@runtime_checkable
class HoldsApart(Protocol):
    """What ``traced`` returns where a library keeps tensors in places of its own.

    A whole step is taken before the one that is traced: such a library may make more in the first than optimizer state.
    """

    most_ranks: ClassVar[int]
    """Most ranks for which it is traced: for more, with states as ``plan_memory`` says and all else as on so many."""

    def held_apart(self, run: Run) -> Mapping[str, Iterable[Tensor]]:
        """Return what is not the module's or the optimizer's own, when the optimizer is about to step.

        Tensors by what they are for: ``parameters``, ``gradients``, ``optimizer``; copies that it steps are of these.
        """
        ...

    def close(self) -> None:
        """Undo what ``wrap_model`` has changed in the process."""
        ...
