"""What a task can do: one protocol for each ability. A task with a method of that name has it called.

A task has ``HasLoss`` or ``RowLoss``; what it has of the others is up to it. All of them are tried before the first
step, so that a task that cannot be evaluated or saved fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from distcore.config import RunConfig
    from distcore.plugin.task.ragged import Ragged
    from distcore.plugin.task.task import Batch, Dataset, Datasets, FileRows

Outputs = dict[str, Any]
"""Outputs of a whole data set: a tensor ``(rows, …)`` or a ``Ragged`` by name, on the CPU; entry i is of row i."""


@runtime_checkable
class HasLoss(Protocol):
    """A task with a loss that counts what ``Dataset.items`` says: rows, tokens, pixels."""

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


@runtime_checkable
class RowLoss(Protocol):
    """A task with a loss per row, which is enough: the core adds it up, and evaluates the mean loss."""

    def row_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each row of ``batch``, shape ``(n,)``, with gradient: in fp32, as for ``loss``.

        Called where the task has no ``loss``; and in evaluation, as the output ``loss``, where it has neither
        ``outputs`` nor ``sums``. A row that counts several items gives their sum.

        Example::

            def row_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                return F.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")
        """
        ...


@runtime_checkable
class HasOutputs(Protocol):
    """A task that is evaluated row by row."""

    def outputs(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | Ragged]:
        """Return what evaluation needs: tensors ``(n, …)``, one entry per row, on the device of ``batch``.

        Any dtype, the same for every batch; all but the first dimension are the same for every batch, too. Where they
        are not, a ``distcore.Ragged`` of n rows takes the place of a tensor. Called without gradient, in evaluation
        mode; the core keeps what comes on the CPU. No name may be ``index``.

        Example::

            def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                logits, label = model(batch["tokens"]).float(), batch["labels"]
                loss = F.cross_entropy(logits, label, reduction="none")
                return {"loss": loss, "prediction": logits.argmax(-1), "label": label}
        """
        ...


@runtime_checkable
class Generates(Protocol):
    """A task whose evaluation calls the model as often as its own answers need."""

    def generate(self, model: nn.Module, batch: Batch, in_step: bool) -> Mapping[str, Tensor | Ragged]:
        """Return outputs as ``outputs`` does, under names of their own; called after it, for the same batch.

        ``model`` is what ``build_model`` returned, not the strategy's wrapper, so that it has its own methods.
        ``in_step``: all ranks must call the model equally often, because each call needs every rank's part of the
        weights; ``generate`` of transformers calls this ``synced_gpus``. Call the whole model, not a part of it.

        Example::

            def generate(self, model: nn.Module, batch: dict[str, Tensor], in_step: bool) -> dict[str, Tensor]:
                tokens, calls = batch["tokens"], 2  # as many on every rank, so that it need not ask ``in_step``
                for _ in range(calls):
                    tokens = torch.cat([tokens, model(tokens).argmax(-1, keepdim=True) + 1], dim=1)
                return {"next": tokens[:, -calls:]}
        """
        ...


@runtime_checkable
class Reports(Protocol):
    """A task that makes metrics of its outputs."""

    def report(self, outputs: Outputs, data: Datasets) -> dict[str, object]:
        """Turn the outputs of a whole data set, on the CPU and in its order, into metrics as JSON values.

        Without rows ``outputs`` is empty; the metrics must be there all the same. Before the first step it is tried on
        the outputs of one micro-batch, repeated until there is one for each row of the evaluation data.

        Example::

            def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
                if not outputs:
                    return {"loss": 0.0, "accuracy": 0.0}
                right = outputs["prediction"] == outputs["label"]
                return {"loss": outputs["loss"].mean().item(), "accuracy": right.float().mean().item()}
        """
        ...


@runtime_checkable
class Sums(Protocol):
    """A task that is evaluated by sums over all rows, so that nothing is kept of a row; alone, or beside outputs."""

    def sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Return sums over the rows of ``batch``, by name: of any shape, the same for every batch, on any device.

        The core adds them up in float64 over all rows of the data set, each once. Called as ``outputs`` is.

        Example::

            def sums(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
                right = model(batch["tokens"]).argmax(-1) == batch["labels"]
                return {"right": right.sum(), "rows": torch.tensor(len(right))}
        """
        ...

    def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Turn the sums over a whole data set, float64 on the CPU, into metrics as JSON values.

        Without rows ``sums`` is empty; the metrics must be there all the same. No metric may have the name of one of
        ``report``.

        Example::

            def report_sums(self, sums: dict[str, Tensor], data: Datasets) -> dict[str, object]:
                return {"share_right": (sums["right"] / sums["rows"]).item() if sums else 0.0}
        """
        ...


@runtime_checkable
class Predicts(Protocol):
    """A task that writes a line for each row that was tested."""

    def predictions(self, outputs: Outputs, data: Datasets) -> Iterable[dict[str, object]]:
        """Turn the same outputs into the lines of predictions.jsonl, one JSON object per row.

        They are the outputs of ``data.test``.

        Example::

            def predictions(self, outputs: dict[str, Tensor], data: Datasets) -> Iterable[dict[str, object]]:
                for index, prediction in enumerate(outputs["prediction"].tolist() if outputs else []):
                    yield {"index": index, "prediction": prediction}
        """
        ...


@runtime_checkable
class PredictsRows(Protocol):
    """A task that predicts rows without labels, for ``distcore predict``.

    It is one of ``ReadsRows`` and ``OpensRows``, and has ``predictions``, too.
    """

    def unlabelled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return a data set of ``rows``, in this order; raises DataError for a row that cannot be used.

        ``data`` is what ``reopen`` returned. ``outputs`` or ``generate`` gets the batches of the data set, and
        ``predictions`` what they return, with the data set as ``data.test``; it yields one line for each row, to which
        the core adds file and row, unless the line has a ``file`` of its own. Called for all rows of a file, some
        thousands at a time, before the first of them is predicted, and then again on every rank: what takes long
        belongs into ``batch``.

        Example::

            def unlabelled(self, rows: FileRows, data: Datasets) -> Dataset:
                return Rows(len(rows.records), seed=rows.start)
        """
        ...


@runtime_checkable
class ReadsRows(PredictsRows, Protocol):
    """One whose rows stand in a data file, in columns that its options name."""

    def row_columns(self) -> Mapping[str, str]:
        """Return the columns that a file with such rows must have, by the option that names each (``columns.text``).

        Example::

            def row_columns(self) -> Mapping[str, str]:
                return {"columns.text": "text"}
        """
        ...


@runtime_checkable
class OpensRows(PredictsRows, Protocol):
    """One that looks for its rows itself: in a folder, or in columns that depend on the file."""

    def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
        """Yield the record of each row of a file or folder, in order, the same ones each time; raises DataError.

        A record ends with the values of the columns ``others``, by the option that names each: none, or the id that
        the user asked for. Goes before ``row_columns``.

        Example::

            def open_rows(self, source: Path, others: Mapping[str, str]) -> Iterator[tuple[object, ...]]:
                for row in map(json.loads, source.read_text().splitlines()):
                    yield row["text"], *(row[column] for column in others.values())
        """
        ...


@runtime_checkable
class Saves(Protocol):
    """A task whose models need more than their weights."""

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
class HasWeights(Protocol):
    """A task whose model does not begin with random weights."""

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return the local folder whose safetensors files hold the weights; ``None`` for random ones or a hub's.

        Example::

            def weights_folder(self, config: RunConfig) -> Path | None:
                folder = Path("pretrained")
                return folder if any(folder.glob("*.safetensors")) else None
        """
        ...
