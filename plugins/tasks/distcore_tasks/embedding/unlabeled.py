"""Texts to embed by a trained model, in chunks of a file."""

from __future__ import annotations

from distcore import FileRows
from distcore_tasks.embedding.dataset import TextsDataset
from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.embedding.prepare import TextsDatasets
from distcore_tasks.shared.jagged import flat_of
from distcore_tasks.shared.schema import texts_schema
from distcore_tasks.shared.source_rows import checked
from distcore_tasks.shared.tokenize_rows import tokenize


def unlabeled_texts(rows: FileRows, options: EmbeddingOptions, data: TextsDatasets) -> TextsDataset:
    """Return the dataset of ``rows``. Raises DataError with file and row for an invalid one."""
    texts = (
        options.prepared("text", text)
        for (text,) in checked(
            f"data file {rows.file}", rows.records, texts_schema({}, ["text"]), rows.start
        )
    )
    tokens, lengths, _ = tokenize(data.loaded_tokenizer, texts, options.length)
    return TextsDataset(texts={"text": flat_of(tokens, lengths)}, pad=data.pad, content="")
