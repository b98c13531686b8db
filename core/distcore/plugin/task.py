"""What is trained: the protocols of a task and of its data. Nothing here knows of ranks, devices or strategies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from distcore.config import RunConfig


Batch = dict[str, "Tensor"]
"""A micro-batch: tensors by name, each of shape ``(n, …)`` for n rows."""


class Dataset(Protocol):
    """Rows that can be fetched a batch at a time."""

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row in tokens, int, shape ``(rows,)``: rows of like length share a micro-batch."""
        ...

    @property
    def items(self) -> np.ndarray:
        """What each row counts in the mean loss, int64, shape ``(rows,)``: 1 per sample, or its number of tokens."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def batch(self, indices: np.ndarray) -> Batch:
        """Collate the rows ``indices``, int64, shape ``(n,)``, in this order and padded to the longest of them.

        Every tensor is ``(n, …)`` on the CPU; the core moves it to the device.
        """
        ...


@runtime_checkable
class Identified(Protocol):
    """A data set that can tell its rows from all others without reading them; a resume compares that."""

    @property
    def content(self) -> str:
        """A digest of what the rows say, in order; made when they were prepared, so that asking costs nothing."""
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


class Task(Protocol):
    """What is trained. Nothing in it knows of ranks, devices or strategies.

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
                return Classifier(dropout=config.dropout or 0.0)
        """
        ...

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the local folder whose safetensors files hold the weights; ``None`` for random ones or a hub's.

        Example::

            def weights_folder(self, config: RunConfig) -> Path | None:
                folder = Path(config.model)
                return folder if any(folder.glob("*.safetensors")) else None
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the *sum* of the loss over the items of ``batch``, a scalar with gradient. The core divides, once.

        ``batch`` is on the device of ``model``, which runs under the core's autocast: return fp32, as torch's
        losses do there.

        Example::

            def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                logits = model(batch["tokens"])  # (n, classes)
                return F.cross_entropy(logits, batch["labels"], reduction="sum")
        """
        ...

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return what evaluation needs: tensors ``(n, …)``, one entry per row, on the device of ``batch``.

        Any dtype, the same for every batch; all but the first dimension are the same for every batch, too. Called
        without gradient, in evaluation mode.

        Example::

            def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                logits, label = model(batch["tokens"]).float(), batch["labels"]
                loss = F.cross_entropy(logits, label, reduction="none")
                return {"loss": loss, "prediction": logits.argmax(-1), "label": label}
        """
        ...

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Turn the outputs of a whole dataset, on the CPU and in its order, into metrics as JSON values.

        Without rows ``outputs`` is empty; the metrics must be there all the same.

        Example::

            def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
                if not outputs:
                    return {"loss": 0.0, "accuracy": 0.0}
                right = outputs["prediction"] == outputs["label"]
                return {"loss": outputs["loss"].mean().item(), "accuracy": right.float().mean().item()}
        """
        ...

    def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Iterable[dict[str, object]]:
        """Turn the same outputs into the lines of predictions.jsonl, one JSON object per row.

        Example::

            def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Iterable[dict[str, object]]:
                for index, prediction in enumerate(outputs["prediction"].tolist() if outputs else []):
                    yield {"index": index, "prediction": prediction}
        """
        ...

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write into the run folder what a user of the model needs beside its weights; on the main rank.

        Called before the first step. What fails to be written ends the run on every rank, in one line.

        Example::

            def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
                names = ["sport", "science", "politics", "weather"]
                (folder / "classes.json").write_text(json.dumps(names))
        """
        ...


@runtime_checkable
class Suggests(Protocol):
    """A task that knows which values suit its model."""

    def suggest(self, config: RunConfig) -> Mapping[str, object]:
        """Return values by key of ``RunConfig`` for keys that the user left at 'auto' (``lr``); reads no data."""
        ...


@runtime_checkable
class Reopens(Protocol):
    """A task whose models can be built again without the data that they were trained on."""

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return data sets without rows, enough for ``build_model`` and ``save``, from what ``save`` wrote.

        ``None`` if it wrote nothing into ``folder``.
        """
        ...
