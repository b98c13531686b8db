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

SPEC_VERSION = 1
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
    """Number of this process among all."""
    size: int = 1
    """Processes of the job, over all machines."""
    local_rank: int = 0
    """Number of this process among those of its machine."""
    local_size: int = 1
    """Processes of the job on this machine."""
    launcher: str = "local"
    """``local`` where distcore starts the ranks itself, else the launcher's name: ``torchrun``, ``slurm``, ``mpi`` …"""
    master_addr: str | None = None
    """Address of the machine of rank 0; ``None``: this machine."""
    master_port: int | None = None
    """Port where rank 0's machine holds, or will hold, the store of the ranks; ``None``: any free one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks as the backend reports them, and the device that belongs to this one."""

    rank: int
    """Number of this process among all, from 0."""
    size: int
    """Processes that the backend connects."""
    local_rank: int
    """Number of this process among those of its machine, from 0."""
    device: torch.device
    """Where this rank computes; on GPUs the current device of its process."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the user."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training is, over the whole run: a resumed one counts on."""

    step: int = 0
    """Optimizer steps that are done, those that fp16 overflow skipped among them."""
    epoch: int = 0
    """Epochs that are complete."""
    step_in_epoch: int = 0
    """Optimizer steps of the current epoch that are done."""
    samples: int = 0
    """Rows that were trained on, by all ranks together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an optimizer step did."""

    grad_norm: Tensor | None = None
    """L2 norm of the whole gradient before clipping, a scalar tensor on the device; ``None``: not computed."""


class LossScale(Protocol):
    """A dynamic loss scale, whoever keeps it; its state has the keys of ``torch.amp.GradScaler`` and maybe more."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers by key."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore. The state of another kind of scaler has only the keys of ``torch.amp.GradScaler``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """A model made ready by a strategy: what the loop calls, and the optimizer that ``step`` steps."""

    model: nn.Module
    """What the loop calls, on the rank's device."""
    optimizer: Optimizer | None
    """What ``step`` steps; ``None`` where the run only evaluates."""
    loss_scale: LossScale | None = None
    """The dynamic loss scale of a strategy that owns precision, to be saved and restored."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of one rank."""

    indices: np.ndarray
    """Row numbers in the dataset, int64, shape ``(n,)``, n >= 1."""
    is_padding: bool = False
    """True where the rank has no rows here: it runs forward and backward on a stand-in row, so that collectives match,
    and the core gives that row no weight."""
    last: bool = True
    """True for the last micro-batch of its step."""


Sampler = Callable[[int, int], Sequence[MicroBatch]]
"""``sampler(epoch, step)`` gives this rank's micro-batches of that step: as many on every rank (law 1)."""

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
    """What ``Task.outputs`` gave, on the CPU, each ``(dataset_size, …)``."""
    metrics: dict[str, object]
    """What ``Task.report`` made of them, as JSON values."""
    evaluated: int
    """Rows that came back from the ranks, stand-ins not counted."""
    unique: int
    """Different rows among them, by the indices that travelled with the outputs."""
    dataset_size: int
    """Rows of the dataset."""

    def summary(self) -> dict[str, object]:
        """Return the ``evaluation`` part of report.json."""
        counts = {"evaluated": self.evaluated, "unique": self.unique, "dataset_size": self.dataset_size}
        return self.metrics | counts


State = dict[str, "Tensor | Piece"]
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
    """The config, in which nothing is ``auto`` any more."""
    world: World
    """The ranks, and the device of this one."""
    capabilities: Capabilities
    """What the strategy declares."""
    module: nn.Module
    """The model as the task built it: its parameter names are those of every checkpoint."""
    model: nn.Module
    """The model as the strategy wrapped it: what the loop calls."""
    optimizer: Optimizer | None = None
    """What ``step`` steps; ``None`` where the run only evaluates."""
    scheduler: LRScheduler | None = None
    """Stepped by the core after each optimizer step; ``None`` where the strategy owns the schedule."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss of an fp16 run whose precision is the core's."""
    loss_scale: LossScale | None = None
    """What checkpoints keep of fp16: ``scaler``, or the strategy's own."""
    total_steps: int = 0
    """Optimizer steps of the whole run."""
    steps_per_epoch: int = 1
    """Optimizer steps of an epoch, the ragged last one among them."""
    accumulation: int = 1
    """Micro-batches that a rank runs in a full step."""
