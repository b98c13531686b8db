"""Read, check, split and tokenize rows of texts; cache the result by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, DataError, Datasets
from distcore_tasks.embedding.dataset import open_texts, write_texts
from distcore_tasks.embedding.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.embedding.encode import encode
from distcore_tasks.embedding.models import check_model
from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.embedding.rows import Groups, schema_of
from distcore_tasks.shared.bert import hidden_size
from distcore_tasks.shared.cache import CachedDatasets, cut_warning
from distcore_tasks.shared.lazy_rows import LazyValues
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.pretrained import load_tokenizer, set_pad_token
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.source_rows import read_rows
from distcore_tasks.shared.sources import data_warnings, read_source
from distcore_tasks.shared.splits import Part, read_parts
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows

if TYPE_CHECKING:
    from distcore import RunConfig

CACHED = CachedDatasets(kind="embeddings", version=1, embedded=EMBEDDED, made_from=MADE_FROM)


@dataclass(frozen=True, kw_only=True)
class TextsDatasets(TokenizedDatasets):
    """Tokenized rows of texts with their tokenizer."""

    group: int
    """Rows of a global batch, in which an evaluation computes the loss."""


def texts_of(data: Datasets) -> TextsDatasets:
    """Return ``data`` with the type that ``prepare`` returns. Raises TypeError for other datasets."""
    if not isinstance(data, TextsDatasets):
        raise TypeError(f"expected the datasets of prepare(), not {type(data).__name__}")
    return data


def prepare_texts(options: EmbeddingOptions, config: RunConfig) -> TextsDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its libraries' versions.
    Raises DataError, ModelError or ConfigError.
    """
    group = int(config.global_batch_size)
    if group < 2 and options.columns.negative is None:
        raise ConfigError(f"global_batch_size = {group}: the negatives of a row are the others of its batch; take more")
    check_model(options)
    settings = [asdict(options.columns), options.max_seq_len]
    entry = CACHED.entry(
        options, config.seed, settings, options.tokenizer.vocab_size, lambda at: _build(at, options, config.seed)
    )
    pad, facts = entry.tokens["pad"], entry.facts
    rows = {name: open_texts(entry.folder / name, options.columns.names, pad) for name in facts}
    return with_rows(
        TextsDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources)},
        entry.tokenizer,
        facts={"data": options.data, **facts},
        warnings=(
            *data_warnings(options),
            *cut_warning(facts, options.max_seq_len, "texts"),
            *_untrained_size(options),
        ),
        group=group,
        **entry.fields,
    )


def _untrained_size(options: EmbeddingOptions) -> Iterator[str]:
    """Yield a warning if the loss never sees whole embeddings, which evaluation and predictions use."""
    size = hidden_size(options)
    if options.dims and isinstance(size, int) and size not in options.dims:
        yield f"dims = {list(options.dims)}: whole embeddings, of {size} numbers, are not trained as such; add {size}"


def _build(folder: Path, options: EmbeddingOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the facts of each dataset."""
    parts = read_parts(options, lambda source: _rows(source, options), seed)
    tokenizer = _make_tokenizer(options, parts["train"])  # a vocabulary must not see the evaluation rows
    facts: dict[str, dict[str, int]] = {}
    for name, part in parts.items():
        cut = write_texts(folder / name, options.columns.names, encode(part.values(), tokenizer, options))
        rows = len(part.numbers)
        facts[name] = {"rows": rows, "texts": rows * len(options.columns.names), "texts_cut": cut}
    sources = source_bounds(options, lambda source: _rows(source, options).values, parts["train"].numbers)
    return tokenizer, {"facts": facts, "sources": sources}


def _rows(source: str, options: EmbeddingOptions) -> Groups:
    if source in EMBEDDED and options.columns.negative is not None:
        raise DataError(f"dataset {source}: has no negatives; leave out columns.negative, or name a file with --data")
    return read_source(source, EMBEDDED, options.filter, lambda path: read_rows(path, schema_of(options.columns)))


def _make_tokenizer(options: EmbeddingOptions, train: Part[Groups]) -> Any:
    if not options.from_scratch:
        return set_pad_token(load_tokenizer(options.model, options.model_folder()))
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    rows = len(train.numbers) * len(options.columns.names)
    texts = LazyValues(lambda: chain.from_iterable(train.values()), rows)
    return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))
