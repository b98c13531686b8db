"""The values that pass between the core and its plugins. They are
frozen, all but ``Compilations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from distcore.plugin.strategy.tally import Tally

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

LocalRange = Callable[[str], tuple[int, int]]
"""Maps a parameter's name to the elements that this rank needs: index of the first in the
flattened one, and count.
"""
WeightStream = Callable[[LocalRange], Iterator[tuple[str, "Tensor"]]]
"""Yields each parameter's name and the elements of ``LocalRange``, flattened, on the CPU, in the
dtype of its source.

Every rank gets all parameters in the same order, even one without elements for this rank. A tied
parameter comes once, by its first name.
"""
LOOPBACK = "127.0.0.1"
"""Address at which the ranks of one machine connect; other machines cannot reach it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """A process as its launcher describes it: its rank, and the address of rank 0."""

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
    """Collectives of a process group. A world with a group gives its strategy other defaults."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks, on every rank."""

    def gather(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of all ranks, in rank order, on every rank."""

    def save(self, run: Run) -> State:
        """Return whole tensors, and this rank's parts of sharded ones."""

    def load(self, run: Run, state: SavedState) -> bool:
        """Read this rank's part of every tensor; always true."""

    def leave(self, world: World) -> bool:
        """Leave the group once every rank has called; always true."""


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
    """Data shard of this rank, counted from 0: ranks of one data shard train on the
    same rows. Default: ``rank``.
    """
    shards: int = 0
    """Number of data shards. Default: ``size``."""
    is_shard_leader: bool = True
    """True on exactly one rank of each data shard: only its rows and losses count."""
    group: RankGroup | None = field(default=None, repr=False, compare=False)
    """The process group that the strategy joined by ``join_process_group``; ``None``:
    it connects ranks itself.
    """

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
    """Training progress over all ranks, since the start of the run."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Whole epochs done; also the number of the current epoch, from 0."""
    step_in_epoch: int = 0
    """Optimizer steps done in the current epoch."""
    samples: int = 0
    """Rows trained on; a row counts again in each epoch."""
    skipped: int = 0
    """Of the optimizer steps, those that changed no weight, since fp16 gradients overflowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of an optimizer step."""

    grad_norm: Tensor | None = None
    """Global L2 norm of the gradient before clipping, a scalar tensor; ``None`` if
    it was not computed.
    """
    skipped: bool = False
    """True if fp16 gradients overflowed, so that no weight was changed: schedule and averaged
    weights do not go on.
    """


class LossScale(Protocol):
    """A dynamic loss scale. Its state has the keys of ``torch.amp.GradScaler``,
    and may have more.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers by key."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. If another kind of scaler saved it, only GradScaler's keys are
        sure to be there.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """The result of ``build_model`` with state for ``wrap_model``; a module alone is
    the same without state.
    """

    model: nn.Module
    """The model before it is wrapped."""
    state: Any = None
    """``run.strategy_state`` in ``wrap_model``, such as the source of a meta model's values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """The result of ``wrap_model``: a model that is ready to run, and its optimizer."""

    model: nn.Module
    """The wrapped model, which the loop calls."""
    optimizer: Optimizer | None
    """The optimizer of ``step``; ``None`` if the run only evaluates."""
    loss_scale: LossScale | None = None
    """The dynamic loss scale of a strategy that owns ``precision``; checkpoints
    save and restore it.
    """
    state: Any = None
    """``run.strategy_state`` in later hooks: the strategy's own state for this model."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank."""

    indices: np.ndarray
    """Row numbers in the dataset, int64, shape ``(n,)``, n >= 1."""
    is_padding: bool = False
    """True if the rank has no row left: ``indices`` is then any row of the batch, with weight 0.

    The rank still runs forward and backward, so that it takes part in every collective.
    """
    last: bool = True
    """True for the last micro-batch of its optimizer step."""
    block: int = 0
    """Number of the block in its step, under ``exact``: the same on any number of ranks."""


Sampler = Callable[[int, int], Sequence[MicroBatch]]
"""``sampler(epoch, step)`` returns this rank's micro-batches of a step: the same number on
every rank (law 1).
"""

StepLoss = Callable[["nn.Module", MicroBatch, "Batch"], "Tensor"]
"""``loss(model, micro, batch)``: the scaled loss of one micro-batch, a scalar on the
device, ready for ``backward``.

It moves the batch to the device and runs the task's loss under the run's autocast; ``model`` is
``run.model`` or a stand-in. A micro-batch of padding has a loss of 0, to which all parameters
contribute.
"""

OptimizerFactory = Callable[["nn.Module"], "Optimizer"]
"""Builds the configured optimizer for a module's parameters; biases and normalization
weights get no decay.
"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of evaluating a whole dataset; the same on every rank."""

    outputs: Outputs
    """The task's outputs by name, on the CPU: tensors ``(rows, …)`` and ``Ragged``; entry i
    is of row i.
    """
    metrics: dict[str, object]
    """The task's metrics, as JSON values."""
    evaluated: int
    """Rows that came back from all ranks, padding not counted."""
    unique: int
    """Different rows among ``evaluated``."""
    dataset_size: int
    """Rows of the dataset. The three counts are equal, or ``evaluate`` would have raised."""
    sets: Mapping[str, Evaluation] = field(default_factory=dict)
    """The evaluation of each set, by name, if there are several; the outputs above are the
    first's, the counts sums.
    """

    def summary(self) -> dict[str, object]:
        """Return the ``evaluation`` entry of report.json: metrics and counts."""
        counts = {
            "evaluated": self.evaluated,
            "unique": self.unique,
            "dataset_size": self.dataset_size,
        }
        return self.metrics | counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """How to build a run's model."""

    build: Callable[[], nn.Module]
    """Build the whole model on the CPU in fp32: random weights by the run's
    seed, or pretrained ones.
    """
    meta_model: Callable[[], nn.Module]
    """Build the same modules on the meta device: names, shapes and dtypes, no storage.

    Raises MetaModelError if the task's ``build_model`` cannot, for example because it reads weights
    itself: call ``build`` then.
    """
    folder: Path | None = None
    """The local folder of the files that ``build`` reads; ``None`` if it reads none, or the
    model has an adapter.
    """
    replay: Callable[[], tuple[nn.Module, WeightStream]] | None = None
    """Build the meta model with values in its buffers; return it, and a stream
    of its parameters' values.

    Each parameter is read or drawn in turn, bit for bit as by ``build``, so that no rank holds the
    whole model. Raises MetaModelError, with the reason, if that is impossible. ``None`` if the base
    of an adapter is known by its values.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModelRef:
    """Weights that are neither trained nor saved: a frozen model's, or the base
    model's of an adapter.
    """

    digest: str
    """SHA-256 of the weights, in hexadecimal: of their files, of their values, or of the
    recipe that draws them.
    """
    what: str
    """The base model in error messages."""
    folder: Path | None = None
    """The local folder with its weights; ``None`` for random weights, and for weights that
    the task reads itself.
    """
    parameters: frozenset[str]
    """The names of its parameters in ``Run.module``; checkpoints leave them out."""


@dataclass
class Compilations:
    """Counts of ``torch.compile`` on this rank; the numbers grow during a run."""

    compilations: int = 0
    """Number of compilations of the model's code."""
    recompilations: int = 0
    """Recompilations among them, e.g. for evaluation or for a batch of size 1."""
    seconds: float = 0.0
    """Seconds of all compilations, backward passes included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run as this rank sees it: config, world, model, optimizer and schedule."""

    config: RunConfig
    """The resolved config. The only 'auto' left is that of ``micro_batch_size`` if
    tokens bound a micro-batch.
    """
    world: World
    """The ranks, and this rank's device."""
    capabilities: Capabilities
    """The capabilities that the strategy declares."""
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
    """The fp32 moving average of this rank's trained weights, as
    ``ema/NAME``; ``None`` without ``ema.decay``.
    """
    compiled: Compilations | None = None
    """Counts of ``torch.compile``; ``None`` if the run only evaluates, because
    evaluation does not compile.
    """
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Choices and measurements from before the first step, by key of report.json."""
    total_steps: int = 0
    """Optimizer steps of the whole run."""
    steps_per_epoch: int = 1
    """Optimizer steps per epoch."""
    rows: int = 0
    """Rows of the training data."""
    accumulation: int = 1
    """Largest number of micro-batches per rank and optimizer step. Steps that are cut by
    tokens differ in it.
    """
    strategy_state: Any = None
    """The strategy's own: in ``wrap_model`` the state of ``BuiltModel``, in later
    hooks that of ``PreparedModel``.
    """
    base: BaseModelRef | None = None
    """The base model of the run's adapter; ``None`` if the run trains no adapter."""
    frozen: Mapping[str, BaseModelRef] = field(default_factory=dict)
    """The task's frozen models by name, as checkpoints name them."""
    consult: Callable[..., Batch] | None = None
    """``consult(batch, training=True)`` adds the answers of the frozen models to a
    batch on the device.

    ``training`` is the mode that the run is in, and stays in. ``None`` if there
    are no frozen models.
    """
    tally: Tally = field(default_factory=Tally)
    """Logged values and requests of this rank until the next log line."""

    @property
    def loss_multiplier(self) -> int:
        """The factor of a rank's loss that undoes a backend's averaging of gradients over data
        shards; 1 if it sums.
        """
        averages = self.capabilities.gradients == "mean" and self.config.exact is None
        return self.world.shards if averages else 1

    def log(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add ``value``, a sum over ``weight`` items. The next log line has the
        mean over all ranks.

        ``name`` must be in ``logs`` of the task or the extension; otherwise TaskError is raised.
        """
        if self.world.is_shard_leader:
            self.tally.add(name, value, weight)

    def epochs_at(self, progress: Progress) -> float:
        """Return the epochs done, the part of the current one included: 1.5 in the middle
        of the second epoch.
        """
        return round(progress.epoch + progress.step_in_epoch / self.steps_per_epoch, 4)


@runtime_checkable
class ComputesElsewhere(Protocol):
    """A strategy whose model computes with other tensors than those of ``run.module``, such
    as an engine's own.
    """

    def computed_weights(self, run: Run) -> State:
        """Return this rank's parts of these weights, by ``model/NAME``, in any
        dtype; nothing is gathered.

        The first save of a run is compared with them, so they must not come
        from what ``save_checkpoint`` reads.
        """


@runtime_checkable
class GathersWeights(Protocol):
    """A strategy that gathers weights from other ranks where modules are called."""

    def gathering_modules(self, run: Run) -> Mapping[str, nn.Module]:
        """Return, by name, the modules whose calls do that; the name of the model itself is empty.

        All ranks must call them in one order. In the first steps the core compares these calls,
        before a rank waits in a collective that another one does not join.
        """
