"""The values that pass between the core and its plugins. All are frozen: a phase returns a new value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from distcore.config import RunConfig
    from distcore.plugin.strategy.capabilities import Capabilities
    from distcore.plugin.strategy.state import SavedState, State
    from distcore.plugin.task.task import Batch, Outputs

Wanted = Callable[[str], tuple[int, int]]
"""Returns which elements of a parameter, by its name, a rank wants: index of the first in the flattened one, count."""
Values = Callable[[Wanted], Iterator[tuple[str, "Tensor"]]]
"""Yields, for each parameter, its name and the elements that are wanted of it, flattened, on the CPU.

One after another, in the same order on every rank, also where none are wanted. A tied one once, by its first name.
"""
LOOPBACK = "127.0.0.1"
"""Address at which the ranks of one machine connect; other machines cannot reach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """What a launcher says about this process: its rank, and where rank 0 is."""

    rank: int = 0
    """Number of this process among all processes of the job, from 0."""
    size: int = 1
    """Number of processes of the job."""
    local_rank: int = 0
    """Number of this process among those on the same machine, from 0."""
    local_size: int = 1
    """Number of the job's processes on this machine."""
    launcher: str = "local"
    """Name of the launcher that started this process."""
    master_addr: str | None = None
    """Address of rank 0's machine; ``None``: this machine."""
    master_port: int | None = None
    """TCP port of the store on rank 0's machine; ``None``: any free port."""


class RankGroup(Protocol):
    """What the ranks of a process group do together. A world that has one gives its strategy other defaults."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks, on every rank."""
        ...

    def gather(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of all ranks, in rank order, on every rank."""
        ...

    def save(self, run: Run) -> State:
        """Return whole tensors and, of those that are spread over the ranks, what this rank holds."""
        ...

    def load(self, run: Run, state: SavedState) -> bool:
        """Read what this rank holds of every tensor; always true."""
        ...

    def leave(self, world: World) -> bool:
        """Leave the group once every rank has called; always true."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The world as the backend reports it, and this rank's device."""

    rank: int
    """Number of this process among all ranks, from 0."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Number of this process among the ranks on the same machine, from 0."""
    device: torch.device
    """The device on which this rank computes."""
    shard: int = -1
    """Data shard of this rank, counted from 0: ranks of one data shard train on the same rows. Default: ``rank``."""
    shards: int = 0
    """Number of data shards. Default: ``size``."""
    is_shard_leader: bool = True
    """True on exactly one rank of each data shard: only its rows and losses count."""
    group: RankGroup | None = field(default=None, repr=False, compare=False)
    """The process group that the strategy joined by ``join_process_group``; ``None``: it connects ranks itself."""

    def __post_init__(self) -> None:
        if self.shard < 0:
            object.__setattr__(self, "shard", self.rank)
        if not self.shards:
            object.__setattr__(self, "shards", self.size)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training has come: what is done, over all ranks and since the start of the run."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Whole epochs done; also the number of the current epoch, from 0."""
    step_in_epoch: int = 0
    """Optimizer steps done in the current epoch."""
    samples: int = 0
    """Rows trained on; a row counts again in each epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an optimizer step reports."""

    grad_norm: Tensor | None = None
    """Global L2 norm of the gradient before clipping, a scalar tensor; ``None`` if it was not computed."""


class LossScale(Protocol):
    """A dynamic loss scale. Its state has the keys of ``torch.amp.GradScaler``, and may have more."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers by key."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. If another kind of scaler saved it, only GradScaler's keys are sure to be there."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """What ``build_model`` returns to hand something on to ``wrap_model``; a module alone is the same without state."""

    model: nn.Module
    """The model before it is wrapped."""
    state: Any = None
    """What ``wrap_model`` finds in ``run.strategy_state``, such as where the values of a meta model come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """What ``wrap_model`` returns: a model that is ready to run, and its optimizer."""

    model: nn.Module
    """What the loop calls."""
    optimizer: Optimizer | None
    """What ``step`` steps; ``None`` if the run only evaluates."""
    loss_scale: LossScale | None = None
    """The dynamic loss scale of a strategy that owns ``precision``; checkpoints save and restore it."""
    state: Any = None
    """What the strategy's later hooks find in ``run.strategy_state``: whatever it must remember about this model."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank."""

    indices: np.ndarray
    """Row numbers in the dataset, int64, shape ``(n,)``, n >= 1."""
    is_padding: bool = False
    """True if the rank has no row left here: ``indices`` is then some row of the batch, with weight 0.

    The rank runs forward and backward all the same, so that it takes part in every collective.
    """
    last: bool = True
    """True for the last micro-batch of its optimizer step."""


Sampler = Callable[[int, int], Sequence[MicroBatch]]
"""``sampler(epoch, step)`` returns this rank's micro-batches of a step: the same number on every rank (law 1)."""

StepLoss = Callable[["nn.Module", MicroBatch, "Batch"], "Tensor"]
"""``loss(model, micro, batch)``: the scaled loss of one micro-batch, a scalar on the device, ready for ``backward``.

It moves the batch to the device and runs the task's loss under the run's autocast; ``model`` is ``run.model`` or what
stands in for it. A micro-batch of padding has a loss of 0 that all parameters took part in.
"""

OptimizerFactory = Callable[["nn.Module"], "Optimizer"]
"""Builds the configured optimizer for a module's parameters; biases and normalization weights get no decay."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of evaluating a whole dataset; the same on every rank."""

    outputs: Outputs
    """What the task returned, by name, on the CPU: tensors ``(rows, …)`` and ``Ragged``; entry i is of row i."""
    metrics: dict[str, object]
    """What the task computed from outputs or sums, as JSON values."""
    evaluated: int
    """Rows that came back from all ranks, padding not counted."""
    unique: int
    """Different rows among them."""
    dataset_size: int
    """Rows of the dataset. The three counts are equal, or ``evaluate`` would have raised."""

    def summary(self) -> dict[str, object]:
        """Return the ``evaluation`` entry of report.json: metrics and counts."""
        counts = {"evaluated": self.evaluated, "unique": self.unique, "dataset_size": self.dataset_size}
        return self.metrics | counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a run's model."""

    build: Callable[[], nn.Module]
    """Build the whole model on the CPU in fp32: random weights by the run's seed, or pretrained ones."""
    skeleton: Callable[[], nn.Module]
    """Build the same modules on the meta device: names, shapes and dtypes, no storage.

    Raises SkeletonError if the task's ``build_model`` cannot, say because it reads weights itself: call ``build`` then.
    """
    folder: Path | None = None
    """The local folder from whose safetensors files ``build`` reads the weights; ``None`` if there is none.

    ``None``, too, where an adapter changes the names of the weights: then ``base`` has it.
    """
    base: ModelSource | None = None
    """How to build the model without its adapter; ``None`` if the run trains none."""
    adapt: Callable[[nn.Module], dict[str, str]] | None = None
    """Puts the adapter into a whole model or a skeleton of ``base``, in place.

    Returns the name of each parameter whose value comes from the base, to the name that it had there: two names where a
    copy is trained. The other parameters are the adapter's, with their values on the CPU, in a skeleton, too.
    """
    replayed: Callable[[], tuple[nn.Module, Values]] | None = None
    """Build the skeleton with values in its buffers; return it, and the values that ``build`` gives its parameters.

    They are drawn one after another, bit for bit those of ``build``, so that no rank holds the whole model. Raises
    SkeletonError, with the reason, where that cannot be promised. ``None`` where weights are not random.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The model beneath an adapter, which is neither trained nor saved."""

    digest: str
    """A SHA-256, in hexadecimal, of the weights: of their files, of their values, or of how they are made."""
    what: str
    """What error messages call it."""
    folder: Path | None = None
    """The local folder with its weights; ``None`` for random ones, and for what the task reads by itself."""
    parameters: frozenset[str]
    """The names of its parameters in ``Run.module``; checkpoints leave them out."""


@dataclass
class Compilations:
    """What ``torch.compile`` has done in a run, on this rank; the numbers grow while it runs."""

    compilations: int = 0
    """Times that code of the model was compiled."""
    recompilations: int = 0
    """Those of them of code that had been compiled before: for an evaluation, or for a size of 1."""
    seconds: float = 0.0
    """What they took, backward passes included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run as this rank sees it: config, world, model, optimizer and schedule."""

    config: RunConfig
    """The resolved config: no 'auto' is left but that of ``micro_batch_size``, where tokens bound a micro-batch."""
    world: World
    """The ranks, and this rank's device."""
    capabilities: Capabilities
    """What the strategy declared."""
    module: nn.Module
    """The model as the task built it; checkpoints use its parameter names."""
    model: nn.Module
    """The model as the strategy wrapped it; the loop calls this one."""
    optimizer: Optimizer | None = None
    """``None`` if the run only evaluates."""
    scheduler: LRScheduler | None = None
    """``None`` for a constant learning rate, or if the strategy owns ``schedule``."""
    scaler: torch.amp.GradScaler | None = None
    """The loss scaler of an fp16 run; ``None`` if the strategy owns ``precision``."""
    loss_scale: LossScale | None = None
    """The loss scale that checkpoints save: ``scaler``, or the strategy's own."""
    ema: State | None = None
    """The fp32 moving average of what this rank holds of the trained weights, as ``ema/NAME``; ``None`` without one."""
    compiled: Compilations | None = None
    """What was compiled of the model; ``None`` if the run only evaluates, which it does without compiling."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was chosen and measured before the first step, as report.json has it, by key."""
    total_steps: int = 0
    """Optimizer steps of the whole run."""
    steps_per_epoch: int = 1
    """Optimizer steps per epoch."""
    rows: int = 0
    """Rows of the training data."""
    accumulation: int = 1
    """Most micro-batches that a rank runs in an optimizer step; cut by tokens, steps have unlike numbers of them."""
    strategy_state: Any = None
    """The strategy's own: in ``wrap_model`` the state of ``BuiltModel``, in later hooks that of ``PreparedModel``."""
    base: Base | None = None
    """What lies beneath the adapter that the run trains; ``None`` if it trains none."""

    def epochs_at(self, progress: Progress) -> float:
        """Return the epochs done, the part of the current one included: 1.5 in the middle of the second epoch."""
        return round(progress.epoch + progress.step_in_epoch / self.steps_per_epoch, 4)
