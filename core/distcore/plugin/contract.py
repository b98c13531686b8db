"""The values that pass between the core and its plugins. All are frozen: a phase returns a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from distcore.config import RunConfig
    from distcore.plugin.task import Batch

SPEC_VERSION = 2
"""Version of the hook specs. It grows when a hook changes in a way that an old plugin would notice."""


LOOPBACK = "127.0.0.1"
"""Where ranks of one machine meet: no other machine can connect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a strategy can do, declared so that the core can refuse a config before any process starts."""

    spec_version: int
    """The hook-spec version that the strategy was written for: a number, not distcore's ``SPEC_VERSION``."""
    processes: Literal["one", "many"] = "many"
    """``one``: it lives in a single process (``--nproc 1``). ``many``: one process per rank."""
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    """Device types it runs on."""
    precisions: frozenset[str] = frozenset({"fp32", "bf16", "fp16"})
    """Values of ``--precision`` that it supports."""
    optimizers: frozenset[str] = frozenset({"adamw"})
    """Values of ``optimizer.name`` that it takes."""
    launchers: frozenset[str] | None = None
    """Launchers that its processes can live under; ``None``: any."""
    gradients: Literal["mean", "sum"] = "mean"
    """What ``backward`` leaves on every rank: the mean or the sum over ranks of their gradients."""
    ranks_per_shard: int = 1
    """Ranks that train on the same rows, as one data shard; where options decide, make ``capabilities`` a property."""
    shards_parameters: bool = False
    """True if parameters are spread over ranks, so that every rank must run the same number of forwards."""
    owns: frozenset[str] = frozenset()
    """What the strategy does itself and the core must leave alone: ``precision``, ``schedule``."""
    collectives_per_step: int | None = None
    """Collectives that one optimizer step of a one-bucket model needs; ``None`` if it depends on the model."""
    limits: tuple[str, ...] = ()
    """Known limits, each a sentence; shown by ``distcore strategies``."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Laws (``gradient``) or single cases (``unused-parameters``) that it does not keep, each with the reason.

    ``distcore check`` skips them and shows the reason. Where it depends on options, make ``capabilities`` a property.
    """


@runtime_checkable
class ChecksConfig(Protocol):
    """A strategy that refuses, before any process starts, what its capabilities cannot say."""

    def check_config(self, config: RunConfig) -> None:
        """Raise DistcoreError, one line; in ``config`` every 'auto' that needs no data is filled in."""
        ...


@runtime_checkable
class ChecksEvaluation(Protocol):
    """A strategy that has less to refuse where a run only evaluates; it is asked this instead of ``check_config``."""

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise DistcoreError, one line, for what cannot be evaluated."""
        ...


@runtime_checkable
class FillsConfig(Protocol):
    """A strategy whose own config files also say things that distcore's config says."""

    def fill_config(self) -> Mapping[str, Any]:
        """Return values by key of ``RunConfig``; each holds where the user has said nothing about that key.

        What the user has said and the file contradicts is for ``check_config`` to refuse.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Where a launcher put this process: ranks count from 0, sizes are numbers of processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "local"
    master_addr: str | None = None
    """Address of the machine of rank 0; ``None``: this machine."""
    master_port: int | None = None
    """Port where rank 0's machine holds, or will hold, the store of the ranks; ``None``: any free one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks as the backend reports them, and the device that belongs to this one."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    shard: int = -1
    """Data shard of this rank, counted from 0: ranks of one data shard train on the same rows. Default: ``rank``."""
    shards: int = 0
    """Number of data shards. Default: ``size``."""
    speaks: bool = True
    """Whether the rows and losses of this rank count: true on exactly one rank of each data shard."""

    def __post_init__(self) -> None:
        if self.shard < 0:
            object.__setattr__(self, "shard", self.rank)
        if not self.shards:
            object.__setattr__(self, "shards", self.size)

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the user."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training is. ``step`` counts optimizer steps, ``samples`` counts rows, over the whole run."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an optimizer step did. ``grad_norm``: global L2 norm before clipping, a scalar tensor, or ``None``."""

    grad_norm: Tensor | None = None


class LossScale(Protocol):
    """A dynamic loss scale, whoever keeps it; its state has the keys of ``torch.amp.GradScaler`` and maybe more."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers by key."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; of ``state_dict``'s keys beside GradScaler's, those of another's state are missing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """A model made ready by a strategy: what the loop calls, and the optimizer that ``step`` steps."""

    model: nn.Module
    optimizer: Optimizer | None
    loss_scale: LossScale | None = None
    """The dynamic loss scale of a strategy that owns precision, to be saved and restored."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of one rank: rows of the dataset, shape ``(n,)``, n >= 1.

    ``is_padding`` marks a rank that got no rows here: it runs the same forward and backward on a stand-in row, so
    that collectives match, and the core gives the row no weight. ``last`` marks the last one of its step.
    """

    indices: np.ndarray
    is_padding: bool = False
    last: bool = True


Sampler = Callable[[int, int], Sequence[MicroBatch]]
"""``sampler(epoch, step)`` gives this rank's micro-batches of that step: as many on every rank (law 1)."""

StepLoss = Callable[["nn.Module", MicroBatch, "Batch"], "Tensor"]
"""``loss(model, micro, batch)``: the scaled loss of one micro-batch, a scalar on the device, ready for ``backward``.

It moves the batch to the device and runs the task's loss under the run's autocast; ``model`` is ``run.model`` or what
stands in for it. A micro-batch of padding has a loss of 0 that all parameters took part in.
"""

OptimizerFactory = Callable[["nn.Module"], "Optimizer"]
"""Builds the configured optimizer over a module's parameters, with no decay on biases and norms."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that is spread over ranks: a run of its elements in row-major order.

    A shard along the first dimension is one, and so is a slice of a flattened buffer.
    """

    values: Tensor
    """The elements, shape ``(count,)``."""
    start: int
    """Index of the first of them in the flattened whole."""
    shape: tuple[int, ...]
    """Shape of the whole."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Outputs of a whole dataset, row i of every tensor being row i of the dataset, and what they amount to."""

    outputs: dict[str, Tensor]
    metrics: dict[str, object]
    evaluated: int
    """Rows that came back from the ranks, stand-ins not counted."""
    unique: int
    """Different rows among them, by the indices that travelled with the outputs."""
    dataset_size: int

    def summary(self) -> dict[str, object]:
        """The ``evaluation`` part of report.json."""
        counts = {"evaluated": self.evaluated, "unique": self.unique, "dataset_size": self.dataset_size}
        return self.metrics | counts


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that is spread over ranks: a range of indices in each dimension.

    A shard along any dimensions is one, such as a block of columns. Where a part is also one run of elements in
    row-major order, ``Piece`` says the same with fewer numbers.
    """

    values: Tensor
    """The elements; its shape is the size of the box, as many dimensions as the whole has, at least one."""
    offset: tuple[int, ...]
    """Index of its first element in each dimension of the whole."""
    shape: tuple[int, ...]
    """Shape of the whole."""


State = dict[str, "Tensor | Piece | Box | Sequence[Box]"]
"""What a rank holds of a checkpoint: ``model/NAME`` for a parameter or buffer, ``optimizer/NAME/exp_avg`` …"""


class SavedState(Protocol):
    """A checkpoint to load from; tensors are read from its files when they are asked for, and only then."""

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor, on the CPU."""
        ...

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return ``count`` elements of the flattened tensor from ``start`` on, shape ``(count,)``, on the CPU."""
        ...

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements of the tensor from index ``offset`` on, in each dimension, on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a run's model comes from."""

    build: Callable[[], nn.Module]
    """Build the whole model on the CPU in fp32, with the run's seed or the saved weights."""
    skeleton: Callable[[], nn.Module]
    """Build the same modules on the meta device: names, shapes and dtypes, no storage."""
    folder: Path | None = None
    """The local folder whose safetensors files ``build`` reads its weights from; ``None``: random weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run on this rank: config, place in the world, model, optimizer and schedule."""

    config: RunConfig
    world: World
    capabilities: Capabilities
    module: nn.Module
    """The model as the task built it: its parameter names are those of every checkpoint."""
    model: nn.Module
    """The model as the strategy wrapped it: what the loop calls."""
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss of an fp16 run whose precision is the core's."""
    loss_scale: LossScale | None = None
    """What checkpoints keep of fp16: ``scaler``, or the strategy's own."""
    total_steps: int = 0
    """Optimizer steps of the whole run."""
    steps_per_epoch: int = 1
    accumulation: int = 1
    """MicroBatch-batches a rank runs in a full step."""
