"""Text classification with a transformers model: a class, several classes or a number per text
or pair of texts.

Methods import what they need, because ``distcore train --help`` imports this class for its flags
and must be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distcore_tasks.text_classification.options import TextOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Dataset, Datasets, FileRows, RunConfig

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Model inputs in a batch; some may be missing."""


@dataclass(frozen=True, kw_only=True)
class TextClassification(TextOptions):
    """A label per text or pair of texts, by a transformers
    classifier; implements ``distcore.Task``.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = ("stdlib-docs", "stdlib-pairs")

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        from distcore_tasks.text_classification.datasets import prepare_text

        return prepare_text(self, config)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a classifier with one output per class of ``data``, or one
        output for a regression.
        """
        from distcore_tasks.text_classification.datasets import texts_of
        from distcore_tasks.text_classification.models import build_classifier

        data = texts_of(data)
        return build_classifier(self, data.classes, vocab_size=data.vocab_size, pad=data.pad)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss summed over the rows of ``batch``: fp32, without dimensions.

        The loss is the cross entropy. For several classes per row it is the binary cross entropy, a
        mean over classes; for numbers it is the squared error.
        """
        return self.problem.loss(_logits(model, batch), batch["labels"])

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``prediction``.

        Classes add ``scored`` and ``scores``; labels add ``loss`` and ``label``.
        """
        return self.problem.outputs(_logits(model, batch), batch.get("labels"))

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return metrics, baselines and, for classes, the ``classification_report``.

        The baselines are ``majority_accuracy`` and ``baseline_loss``. All values
        are ``None`` without rows.
        """
        from distcore_tasks.shared.classification.predictions import remark
        from distcore_tasks.text_classification.datasets import texts_of

        trained = data.facts.get("train")
        metrics = self.problem.report(
            outputs, texts_of(data).classes, trained if isinstance(trained, dict) else {}
        )
        return metrics | remark(metrics, data.facts, self.from_scratch)

    def predictions(
        self, outputs: dict[str, Tensor], data: Datasets
    ) -> Iterator[dict[str, object]]:
        """Yield origin, label (if any), prediction and scores of each row, in order.

        The origin is ``index`` in the dataset, ``file``, ``row`` and, with a column of ids, ``id``.
        Labels are as in the data file, or ``class_names``. ``scores`` has the probabilities of at
        most ``SCORED`` classes, the most probable first.
        """
        from distcore_tasks.rows.dataset import RowDataset
        from distcore_tasks.text_classification.datasets import texts_of

        data, test = texts_of(data), data.test
        origins = test.origins() if isinstance(test, RowDataset) else repeat({})
        return self.problem.lines(outputs, data.labels, origins)

    def row_columns(self) -> dict[str, str]:
        """Return the columns of rows without labels: the texts."""
        return self.used_columns.settings(labeled=False)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return a dataset that tokenizes texts batch by batch.

        Raises DataError for an invalid text.
        """
        from distcore_tasks.rows.prepare import rows_to_predict
        from distcore_tasks.text_classification.datasets import texts_of
        from distcore_tasks.text_classification.rows import LabeledRows

        return rows_to_predict(LabeledRows(self, is_predicted=True), rows, texts_of(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer and ``labels.json`` to ``folder``: predictions need these
        files and the weights.

        The tokenizer truncates as in training.
        """
        from distcore_tasks.shared.classification.predictions import write_labels
        from distcore_tasks.shared.pretrained import set_length
        from distcore_tasks.text_classification.datasets import texts_of

        data = texts_of(data)
        data.save_files(folder)
        set_length(folder, self.max_seq_len)
        write_labels(folder, data.labels)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return the classes and tokenizer in ``folder``, without rows; ``None`` if
        it has no ``labels.json``.
        """
        from functools import partial

        from distcore_tasks.rows.dataset import empty_rows
        from distcore_tasks.shared.classification.predictions import read_labels
        from distcore_tasks.shared.tokenized import empty_datasets
        from distcore_tasks.text_classification.datasets import TextDatasets
        from distcore_tasks.text_classification.rows import LabeledRows

        labels = read_labels(folder)
        if labels is None:
            return None
        empty = partial(empty_rows, LabeledRows(self))
        classes = tuple(map(str, labels))
        return empty_datasets(TextDatasets, folder, empty, classes=classes, labels=labels)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits in fp32, shape ``(n, outputs)``.

    Under autocast the model returns half precision.
    """
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    logits: Tensor = model(**inputs).logits.float()
    return logits
