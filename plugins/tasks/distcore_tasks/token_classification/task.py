"""Token classification: a tag for each word of a row, by a transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore import Dataset, Datasets, FileRows
from distcore_tasks.rows.dataset import RowDataset, empty_rows
from distcore_tasks.rows.prepare import prepare_rows, rows_to_predict
from distcore_tasks.shared.bert import check_encoder
from distcore_tasks.shared.classification.predictions import read_labels, write_labels
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.pretrained import set_length
from distcore_tasks.shared.streams.preparing import check_stream
from distcore_tasks.shared.tokenized import empty_datasets
from distcore_tasks.token_classification.datasets import TagDatasets, tagged
from distcore_tasks.token_classification.embedded import EMBEDDED
from distcore_tasks.token_classification.metrics import tag_metrics
from distcore_tasks.token_classification.models import build_model
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.rows import TaggedRows
from distcore_tasks.token_classification.tags import Tag
from distcore_tasks.token_classification.words import load_words_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Ragged, RunConfig


@dataclass(frozen=True, kw_only=True)
class TokenClassification(TagOptions):
    """One tag per word; implements ``distcore.plugin.task.task.Task``.

    Each word is one item of the mean loss, predicted at its first token.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = tuple(EMBEDDED)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        check_encoder(self, self.max_seq_len, "TOKEN_CLASSIFICATION", "does not tag tokens")
        if self.stream:
            check_stream(self, {})
        return prepare_rows(TaggedRows(self), config, TagDatasets)

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return a model with one output per tag of ``data`` for each token."""
        data = tagged(data)
        return build_model(self, data.classes, vocab_size=data.vocab_size, pad=data.pad)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the words of ``batch``: fp32, without dimensions."""
        from torch.nn.functional import cross_entropy

        wanted = batch["labels"] != IGNORED
        return cross_entropy(
            _logits(model, batch)[wanted], batch["labels"][wanted], reduction="sum"
        )

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | Ragged]:
        """Return ``word``, the words with a token in each row, and their ``prediction``, int64.

        ``words`` is the number of words of the row, int64 ``(n,)``. With labels there are also
        ``label`` of the same words, and ``loss``, the sum over these words, fp32 ``(n,)``.
        """
        from torch.nn.functional import cross_entropy

        from distcore import Ragged

        logits = _logits(model, batch)
        begins = batch["begins"]
        # A word is judged by its first token; the row may have been cut before it.
        is_judged = begins >= 0
        counts = is_judged.sum(1)
        outputs: dict[str, Tensor | Ragged] = {
            "words": batch["words"],
            "word": Ragged(begins[is_judged], counts),
            "prediction": Ragged(logits.argmax(-1)[is_judged], counts),
        }
        labels = batch.get("labels")
        if labels is not None:
            losses = cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
            )
            outputs["loss"] = losses.view_as(labels).sum(1)
            outputs["label"] = Ragged(labels[is_judged], counts)
        return outputs

    def report(self, outputs: dict[str, Any], data: Datasets) -> dict[str, object]:
        """Return ``loss``, the mean over words, the ``tag_metrics``, and ``words_cut``.

        ``words_cut`` counts the words without a prediction, because their row was cut. All values
        but that are ``None`` without rows.
        """
        classes = tagged(data).classes
        tags: list[list[str]] = []
        predicted: list[list[str]] = []
        words = 0
        if outputs:
            tags = _names(outputs["label"], classes)
            predicted = _names(outputs["prediction"], classes)
            words = int(outputs["words"].sum())
        judged_words = sum(map(len, tags))
        loss = None
        if judged_words:
            loss = outputs["loss"].double().sum().item() / judged_words
        metrics = tag_metrics(tags, predicted, classes)
        return {"loss": loss, **metrics, "words_cut": words - judged_words}

    def predictions(self, outputs: dict[str, Any], data: Datasets) -> Iterator[dict[str, object]]:
        """Yield origin, ``label`` (if any) and ``prediction`` of each row, in order.

        The origin is ``index`` in the dataset, ``file``, ``row`` and, with a column of ids, ``id``.
        ``label`` and ``prediction`` are lists with the tag of each word, as in the data file;
        ``None`` for a word that was cut.
        """
        labels = tagged(data).labels
        test = data.test
        origins = test.origins() if isinstance(test, RowDataset) else repeat({})
        words_of_rows = outputs["words"].tolist() if outputs else []
        # Not strict: rows without an origin repeat an empty one for ever.
        for index, (words, origin) in enumerate(zip(words_of_rows, origins, strict=False)):
            line: dict[str, object] = {"index": index, **origin}
            for name in ("label", "prediction"):
                if name in outputs:
                    positions = outputs["word"][index]
                    line[name] = _by_word(words, positions, outputs[name][index], labels)
            yield line

    def row_columns(self) -> dict[str, str]:
        """Return the only column of rows without tags, the words."""
        return {"columns.tokens": self.columns.tokens}

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return words, which are tokenized batch by batch. Raises DataError for an invalid row."""
        return rows_to_predict(TaggedRows(self, is_predicted=True), rows, tagged(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write tokenizer files and ``labels.json`` to ``folder``, which
        predictions need besides weights.

        The tokenizer truncates as in training.
        """
        data = tagged(data)
        data.save_files(folder)
        set_length(folder, self.max_seq_len)
        write_labels(folder, data.labels)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the tags and tokenizer that ``save`` wrote; ``None``
        if there are none.
        """
        labels = read_labels(folder)
        if labels is None:
            return None
        known = {"classes": tuple(map(str, labels)), "labels": labels}
        empty = partial(empty_rows, TaggedRows(self))
        return empty_datasets(TagDatasets, folder, empty, load_words_tokenizer, **known)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits in fp32, shape ``(n, longest, tags)``; autocast makes the
    model return half precision.
    """
    logits: Tensor = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits
    return logits.float()


def _names(tags: Ragged, classes: tuple[str, ...]) -> list[list[str]]:
    """Return the names of the tags of each row."""
    return [[classes[tag] for tag in row.tolist()] for row in tags]


def _by_word(
    words: int, positions: Tensor, tags: Tensor, labels: tuple[Tag, ...]
) -> list[Tag | None]:
    """Return one tag a word: ``tags`` for those at ``positions``, ``None`` for others."""
    by_word: list[Tag | None] = [None] * words
    for position, tag in zip(positions.tolist(), tags.tolist(), strict=True):
        by_word[position] = labels[tag]
    return by_word
