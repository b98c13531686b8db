"""What is trained: the protocols of a task and of its data. Nothing here knows of ranks, devices or strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from distcore.errors import TaskError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

    from distcore.config import RunConfig
    from distcore.plugin.batching.columns import Column


Direction = Literal["min", "max"]
"""Whether a smaller or a larger value of a metric is better."""
OnResume = Literal["free", "ask", "other rows"]
"""What a resumed run may do with an option of its task, which must stay as it is without an entry.

``free``: change it. ``ask``: change it if the user accepts that with ``--resume-changed``. ``other rows``: the same,
and its training rows may then differ too.
"""

Batch = Any
"""A micro-batch: any nesting of dicts, lists and tuples, named ones too, that holds tensors and plain values.

Most tasks have a dict of tensors of shape ``(n, …)`` for n rows.
"""


class Dataset(Protocol):
    """Rows that can be fetched a batch at a time."""

    @property
    def lengths(self) -> Column:
        """Length of each row in tokens: rows of like length share a micro-batch."""
        ...

    @property
    def items(self) -> Column:
        """What each row counts in the mean loss: 1 per sample, or its number of tokens."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate the rows ``indices``, int64, shape ``(n,)``, in this order and padded to the longest of them.

        Tensors are on the CPU; the core moves them to the device. The same rows give the same values each time, on
        every rank and in every loader process; what is random belongs into ``at``, of ``Varying``. On an accelerator it
        is called in a thread of its own, for the step after the present one, while the loss of this one is computed.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A data set that can tell its rows from all others without reading them; a resume compares that.

    One whose columns are no arrays must: then length and items of each row are part of what it tells apart.
    """

    @property
    def content(self) -> str:
        """A digest of what the rows say, in order; made when they were prepared, so that asking costs nothing."""
        ...


@runtime_checkable
class Varying(Protocol):
    """A data set whose rows differ from epoch to epoch, as with masking or augmentation; training asks for it."""

    def at(self, epoch: int) -> Dataset:
        """Return the rows as they are in ``epoch``, counted from 0: as many and as long as before, in the same order.

        Called when an epoch starts, and again when a run resumes inside it: the answer depends on ``epoch`` and on
        nothing else. ``items``, and what ``batch`` gives, may differ between epochs; ``distcore.row_random`` makes
        random numbers for a row of an epoch.
        """
        ...


@runtime_checkable
class Packs(Protocol):
    """A data set whose ``batch`` may put short rows into one sequence instead of padding each."""

    @property
    def packed(self) -> bool:
        """Whether it does: then a micro-batch takes the time of its tokens alone, and none is cut to save padding."""
        ...


@runtime_checkable
class PacksOrPads(Packs, Protocol):
    """One that packs and could also pad: at the start of a run the two are compared."""

    def padded(self) -> Dataset | None:
        """Return the same rows, padded; ``None`` if they are not the same then. One that pads returns itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a task prepared."""

    train: Dataset
    """What is learnt from."""
    evaluation: Dataset
    """What is evaluated while training, and at its end."""
    test: Dataset
    """What the final weights are tested on; may be the same object as ``evaluation``, and is then evaluated once."""
    facts: dict[str, object] = field(default_factory=dict)
    """What the report should say of the data (classes, majority share, …), as JSON values."""
    warnings: tuple[str, ...] = ()
    """What the user should know of the rows before training, one line each; the main rank logs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRows:
    """Rows of a data file that follow each other, for a task that predicts them."""

    file: str
    """The file, as the user named it."""
    start: int
    """Number of the first of these rows, counted from 1, without a header."""
    records: Sequence[tuple[object, ...]]
    """The values of each row in the columns that the task asked for, in that order."""
    ids: Sequence[int | str] | None = None
    """What the user calls each row; ``None`` where no column says it. The core adds it to the lines."""


class Task(Protocol):
    """What is trained. Nothing in it knows of ranks, devices or strategies.

    Beside these two methods it has ``loss`` or ``row_loss``, and what its evaluation needs: ``outputs`` and ``report``,
    or ``sums`` and ``report_sums``; with ``row_loss`` nothing else. All else is optional. The methods stand in
    ``distcore.plugin.task.optional``, and a task with one of that name has it called.

    What a method raises as a DistcoreError ends the run in one line; anything else is a failure with a traceback.
    The examples together are a task, and a test trains it; ``Rows`` in them is a ``Dataset`` that makes rows up,
    ``Classifier`` a model of token embeddings, and ``F`` is ``torch.nn.functional``.
    """

    def prepare(self, config: RunConfig) -> Datasets:
        """Read, check and cache the data; called before ranks start and, cheap by then, once on each rank.

        Every rank must get the same rows in the same order. Raises DistcoreError for rows that cannot be used.

        Example::

            def prepare(self, config: RunConfig) -> Datasets:
                train, held_out = Rows(50, seed=config.seed), Rows(11, seed=1)
                return Datasets(train=train, evaluation=held_out, test=held_out, facts={"classes": 4})
        """
        ...

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the model in fp32 on torch's default device; the core has seeded the random state.

        On the meta device no weights are read; if it fails there, or gives values all the same, strategies that shard
        build the model whole instead. Raises DistcoreError where it cannot be built.

        Example::

            def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
                return Classifier(dropout=0.0)
        """
        ...


def declared_metrics(task: object) -> dict[str, Direction]:
    """Return the metrics that ``task`` declares, in its attribute ``metrics``, with what is better; default: the loss.

    Raises TaskError for a direction other than ``min`` and ``max``.
    """
    found: dict[str, Direction] = getattr(task, "metrics", {"loss": "min"})
    for name, direction in found.items():
        if direction not in ("min", "max"):
            raise TaskError(f"task {type(task).__name__}: metrics[{name!r}] = {direction!r}: expected 'min' or 'max'")
    return found


def on_resume_of(task: object) -> Mapping[str, OnResume]:
    """Return what ``task`` says, in its attribute ``on_resume``, of its options; default: none may change."""
    found: Mapping[str, OnResume] = getattr(task, "on_resume", {})
    return found


@runtime_checkable
class Suggests(Protocol):
    """A task that knows which values suit its model."""

    def suggest(self, config: RunConfig) -> Mapping[str, object]:
        """Return values by key of ``RunConfig`` for keys that the user left at 'auto' (``lr``); reads no data."""
        ...


@runtime_checkable
class Unpads(Protocol):
    """A task whose models can compute padded rows without their padding (``--packing``)."""

    def why_not_unpadded(self) -> str | None:
        """Return why the configured model cannot, or is not known to be right; ``None`` if it can. Reads no data."""
        ...

    def unpad(self, module: nn.Module) -> Callable[[], None]:
        """Have ``module``, as ``build_model`` returned it, skip padding from now on; return what undoes that.

        Called at most once for a model, after a strategy has wrapped it, and on every rank. Outputs and gradients stay
        what they are.
        """
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A task whose models, without padding, leave out what nothing reads."""

    def left_out(self) -> float:
        """Return which part of the work for a token that is, from 0 to 1; reads no data."""
        ...


@runtime_checkable
class Narrows(Protocol):
    """A task whose models, without padding, can leave out the outputs of places that have no target."""

    def narrow(self, module: nn.Module, data: Datasets) -> Datasets:
        """Have ``module`` do so for batches that say where their targets are; return ``data`` with such batches.

        Called like ``Unpads.unpad``, after it. Losses and gradients stay what they are; for batches of ``data`` as it
        was, and of ``PacksOrPads.padded``, so does the model.
        """
        ...


@runtime_checkable
class Reopens(Protocol):
    """A task whose models can be built again without the data that they were trained on."""

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return data sets without rows, enough for ``build_model`` and ``save``, from what ``save`` wrote.

        ``None`` if it wrote nothing into ``folder``.
        """
        ...
