"""A task on rows of texts that a user writes in some thirty lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from distcore import Dataset, Datasets, Direction, FileRows, OnResume, Simple, TaskError
from distcore_tasks.rows.dataset import empty_rows
from distcore_tasks.rows.pipeline import RowPipeline
from distcore_tasks.rows.prepare import prepare_rows, rows_to_predict
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import check_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.tokenized import TokenizedDatasets, empty_datasets, tokenized

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import RunConfig

SCRATCH = "own"
"""``--model`` of a network with random weights and a tokenizer that is trained on the rows."""


@dataclass(frozen=True)
class Network:
    """The network that the task builds; a ``Shape`` of ``built_in``."""

    lr: float = 1e-3
    """Peak learning rate."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a network with random weights, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class RowTask(TaskOptions, Simple):
    """A task on rows of data files: what a row is, a network, and a loss of each row.

    Make the subclass a frozen dataclass, and its fields are options. Every row counts one in the
    mean loss. Data files of all formats, cache, streams, mixtures, filters, bad rows, several
    evaluation sets, prediction files and resume are those of the shipped tasks.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class Scores(RowTask):
            columns: Columns = Columns()

            def rows(self, config):
                return ScoredPairs(self)

            def build_model(self, config, data):
                return Scorer(data.vocab_size)

            def row_loss(self, model, batch):
                return (model(batch["input_ids"]) - batch["score"]).square()
    """

    built_in: ClassVar[Mapping[str, Network]] = {SCRATCH: Network()}
    lr: ClassVar[float] = 1e-3
    metrics: ClassVar[dict[str, Direction]] = {"loss": "min"}
    targets: ClassVar[tuple[str, ...]] = ()
    """Columns that rows to predict do not have, by their config keys without ``columns.``."""
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "columns": "free",  # rows are compared by content
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = SCRATCH  # type: ignore[assignment]
    """``own``, or the local Hugging Face folder or hub name of the tokenizer."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a network with random weights."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Tokens of a row; longer ones are cut."""

    @abstractmethod
    def rows(self, config: RunConfig) -> RowPipeline[Any]:
        """Return what a row is: a ``TextRows``, or another pipeline."""

    def row_predictions(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a line of predictions has of its row, a tensor ``(n,)`` for each name."""
        return {}

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return the learning rate of a run that does not set one."""
        return {"lr": self.lr}

    def weights_folder(self, config: RunConfig) -> Path | None:
        """Return ``None``: ``build_model`` returns the weights, too."""
        return None

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets, from the cache if it has them.

        Raises DataError with file and row, ModelError, TaskError or ConfigError.
        """
        if not self.from_scratch:
            check_length(self.model, self.model_folder(), self.max_seq_len)
        if self.stream:
            check_stream(self, {})
        return prepare_rows(self.rows(config), config, TokenizedDatasets)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the network in fp32. ``data.vocab_size`` and ``data.pad`` are the tokenizer's."""
        raise TaskError(f"task {type(self).__name__}: has no build_model(config, data)")

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the metrics of each row, and what is predicted of it."""
        return super().outputs(model, batch) | self.row_predictions(model, batch)

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield ``index``, and the values of ``row_predictions``; without any, the metrics."""
        predicted = [name for name in outputs if name not in self.metrics] or list(outputs)
        columns = [outputs[name].tolist() for name in predicted]
        for index, values in enumerate(zip(*columns, strict=True)):
            yield {"index": index} | dict(zip(predicted, values, strict=True))

    def row_columns(self) -> dict[str, str]:
        """Return the columns of rows to predict: all but ``targets``."""
        return {key: name for key, name in self._columns.items() if not self._is_target(key)}

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return rows to predict. Raises DataError for an invalid one."""
        from distcore import RunConfig

        pipeline = self.rows(RunConfig())
        return rows_to_predict(pipeline, self._with_targets(rows, pipeline), tokenized(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, next to the weights."""
        tokenized(data).save_files(folder)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:  # type: ignore[override]
        """Return datasets without rows, with the tokenizer of ``save``; ``None`` without it."""
        empty = partial(empty_rows, self.rows(config))
        return empty_datasets(TokenizedDatasets, folder, empty)

    @property
    def _columns(self) -> Mapping[str, str]:
        from distcore import RunConfig

        return self.rows(RunConfig()).columns

    def _is_target(self, key: str) -> bool:
        return key.removeprefix("columns.") in self.targets

    def _with_targets(self, rows: FileRows, pipeline: RowPipeline[Any]) -> FileRows:
        """Return rows to predict with something in place of their targets: no prediction may
        depend on it.
        """
        numbers = getattr(pipeline, "numbers", ())
        records = []
        for record in rows.records:
            values = iter(record)
            whole = [
                (0.0 if key.removeprefix("columns.") in numbers else "?")
                if self._is_target(key)
                else next(values)
                for key in pipeline.columns
            ]
            records.append(tuple(whole))
        return replace(rows, records=records)
