"""Text embeddings: texts of a pair come near each other, and far from those of other pairs.

Methods import what they need, because ``distcore train --help`` imports this class for its flags
and must be fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distcore_tasks.embedding.options import EmbeddingOptions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Dataset, Datasets, FileRows, RunConfig

COLUMNS = ("anchor", "positive", "negative")
"""Names of the embeddings of a row."""


@dataclass(frozen=True, kw_only=True)
class Embedding(EmbeddingOptions):
    """Embeddings from pairs and triplets, by a loss over the global batch.

    Implements ``distcore.Task``.
    """

    laws_hold: ClassVar = True
    embedded: ClassVar = ("stdlib-search",)

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the tokenized datasets, from the cache if it has them.

        Raises DataError, ModelError or ConfigError.
        """
        from distcore_tasks.embedding.datasets import TextsDatasets
        from distcore_tasks.embedding.models import check_model
        from distcore_tasks.embedding.rows import GroupRows
        from distcore_tasks.rows.prepare import prepare_rows
        from distcore_tasks.shared.streams.preparing import check_stream

        group = int(config.global_batch_size)
        self._check_negatives(group)
        check_model(self)
        if self.stream:
            check_stream(self, {})
        return prepare_rows(GroupRows(self), config, TextsDatasets, group=group)

    def _check_negatives(self, group: int) -> None:
        """Raise an error unless a row has negatives: its own, or those of its batch."""
        from distcore import ConfigError, DataError
        from distcore_tasks.shared.sources import naming

        if self.columns.negative is None:
            if group < 2:
                raise ConfigError(
                    f"global_batch_size = {group}: the negatives of a row are the others of its"
                    " batch; take more"
                )
            return
        for name, source in self.sources.items():
            if source in self.embedded:
                with naming(name):
                    raise DataError(
                        f"dataset {source}: has no negatives; leave out columns.negative, or name a"
                        " file with --data"
                    )

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        """Return the encoder."""
        from distcore_tasks.embedding.models import build_encoder
        from distcore_tasks.shared.tokenized import tokenized

        data = tokenized(data)
        return build_encoder(self, vocab_size=data.vocab_size, pad=data.pad)

    def embed(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return embeddings of length 1, fp32 ``(n, size)``, and the digests of the texts.

        The embeddings are ``anchor``, ``positive`` and, if rows have one, ``negative``; the digests
        are ``same``, ``(n, texts of a row, 2)``. The model is called for each text of a row by
        itself: masks of dropout by row then differ between them.
        """
        embeddings = {}
        for name, inputs in batch.items():
            if name != "same":
                unpooled = self.unpooled_tokens[name]
                embeddings[name] = _embeddings(model, inputs, self.pools, unpooled)
        return embeddings | {"same": batch["same"]}

    def batch_loss(self, embeddings: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Return the mean loss of a global batch's rows, each against the texts of all others."""
        from distcore_tasks.embedding.losses import row_losses

        return row_losses(self, _columns(embeddings), embeddings["same"]).mean()

    def outputs(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return what ``embed`` does; of rows to embed only ``text``."""
        outputs = self.embed(model, batch)
        return {"text": outputs["text"]} if "text" in outputs else outputs

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return ``loss`` and the metrics of retrieval over all rows; with ``dims`` also by size.

        The loss is over parts of about as many rows as a global batch has, so that it compares with
        that of training. All are ``None`` without rows.
        """
        if not outputs:
            return dict.fromkeys(self.metrics)
        import torch
        from torch.nn.functional import normalize

        from distcore_tasks.embedding.datasets import texts_of
        from distcore_tasks.embedding.known import text_numbers
        from distcore_tasks.embedding.losses import row_losses
        from distcore_tasks.embedding.retrieval import metrics, ranks

        embeddings = _columns(outputs)
        same = outputs["same"]
        parts = max(1, round(len(same) / texts_of(data).group))
        losses = []
        for part in range(parts):
            # Every parts-th row: the parts differ in size by at most one row.
            embeddings_of_part = [column[part::parts] for column in embeddings]
            losses.append(row_losses(self, embeddings_of_part, same[part::parts]))
        report: dict[str, object] = {"loss": torch.cat(losses).double().mean().item()}
        anchors, positives, *_ = embeddings
        numbers = text_numbers(same)
        report |= metrics(ranks(anchors, positives, numbers))
        metrics_by_size = {}
        for size in self.dims:
            short_anchors = normalize(anchors[:, :size])
            short_positives = normalize(positives[:, :size])
            metrics_by_size[str(size)] = metrics(ranks(short_anchors, short_positives, numbers))
        if metrics_by_size:
            report["sizes"] = metrics_by_size
        return report

    def predictions(
        self, outputs: dict[str, Tensor], data: Datasets
    ) -> Iterator[dict[str, object]]:
        """Yield ``index``, and ``embedding`` of a text or ``similarity`` and ``rank`` of a pair."""
        if not outputs:
            return
        if "anchor" not in outputs:
            for index, embedding in enumerate(outputs["text"].tolist()):
                yield {"index": index, "embedding": embedding}
            return
        from distcore_tasks.embedding.known import text_numbers
        from distcore_tasks.embedding.retrieval import ranks

        anchors, positives = outputs["anchor"], outputs["positive"]
        ranks_of_rows = ranks(anchors, positives, text_numbers(outputs["same"])).tolist()
        # Cosines, since embeddings have length 1.
        similarities = (anchors * positives).sum(-1).tolist()
        for index, similarity in enumerate(similarities):
            yield {"index": index, "similarity": similarity, "rank": ranks_of_rows[index]}

    def row_columns(self) -> dict[str, str]:
        """Return the column of texts to embed."""
        from distcore_tasks.embedding.rows import GroupRows

        return dict(GroupRows(self, is_predicted=True).columns)

    def unlabeled(self, rows: FileRows, data: Datasets) -> Dataset:
        """Return texts to embed. Raises DataError for an invalid one."""
        from distcore_tasks.embedding.datasets import texts_of
        from distcore_tasks.embedding.rows import GroupRows
        from distcore_tasks.rows.prepare import rows_to_predict

        return rows_to_predict(GroupRows(self, is_predicted=True), rows, texts_of(data))

    def save(self, folder: Path, config: RunConfig, data: Datasets) -> None:
        """Write the tokenizer to ``folder``, and the files of sentence-transformers."""
        from distcore_tasks.embedding.modules import write_modules
        from distcore_tasks.shared.bert import hidden_size
        from distcore_tasks.shared.pretrained import set_length
        from distcore_tasks.shared.tokenized import tokenized

        tokenized(data).save_files(folder)
        set_length(folder, self.length)
        write_modules(folder, self.pools, hidden_size(self), self.length, self.exported_settings)

    def reopen(self, folder: Path, config: RunConfig) -> Datasets | None:
        """Return datasets without rows, with the saved tokenizer; ``None`` if there is none."""
        from functools import partial

        from distcore_tasks.embedding.datasets import TextsDatasets
        from distcore_tasks.embedding.rows import GroupRows
        from distcore_tasks.rows.dataset import empty_rows
        from distcore_tasks.shared.tokenized import empty_datasets

        empty = partial(empty_rows, GroupRows(self))
        group = int(config.global_batch_size)
        return empty_datasets(TextsDatasets, folder, empty, group=group)


def _columns(embeddings: dict[str, Tensor]) -> list[Tensor]:
    """Return anchors, positives and, if rows have one, negatives, each ``(n, size)``."""
    return [embeddings[name] for name in COLUMNS if name in embeddings]


def _embeddings(model: nn.Module, inputs: dict[str, Tensor], pools: str, unpooled: int) -> Tensor:
    """Return the embedding of each text, fp32 ``(n, size)``, of length 1.

    ``unpooled``: tokens at the beginning, of a prompt, that a mean leaves out.
    """
    from torch.nn.functional import normalize

    hidden = model(**inputs).last_hidden_state.float()
    if pools == "cls":
        return normalize(hidden[:, 0], dim=-1)
    weights = inputs["attention_mask"][..., None].to(hidden)
    if unpooled:
        weights[:, :unpooled] = 0
    # Clamped: a text may have no token but those of the prompt.
    tokens = weights.sum(1).clamp(min=1)
    mean = (hidden * weights).sum(1) / tokens
    return normalize(mean, dim=-1)
