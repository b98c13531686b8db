"""Read, check, split and tokenize rows of texts; cache the result by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, DataError, Datasets
from distcore_tasks.embedding.dataset import open_texts, write_texts
from distcore_tasks.embedding.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.embedding.encode import encode, make_tokenizer, prepared_as
from distcore_tasks.embedding.models import check_model
from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.embedding.rows import Groups, schema_of
from distcore_tasks.embedding.streamed import stored_texts, streaming_of
from distcore_tasks.shared.bert import hidden_size
from distcore_tasks.shared.cache import CachedDatasets, cut_warning
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.source_rows import read_rows
from distcore_tasks.shared.sources import data_warnings, read_source
from distcore_tasks.shared.splits import read_parts
from distcore_tasks.shared.streams.preparing import check_stream, open_rows, open_sets, stream_parts
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
    """Return ``data`` with the type that ``prepare`` returns. Raises
    TypeError for other datasets.
    """
    if not isinstance(data, TextsDatasets):
        raise TypeError(f"expected the datasets of prepare(), not {type(data).__name__}")
    return data


def prepare_texts(options: EmbeddingOptions, config: RunConfig) -> TextsDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. Raises DataError, ModelError or ConfigError.
    """
    group = int(config.global_batch_size)
    if group < 2 and options.columns.negative is None:
        raise ConfigError(
            f"global_batch_size = {group}: the negatives of a row are the others of its batch; take"
            " more"
        )
    check_model(options)
    if options.stream:
        check_stream(options, {})
    settings = [asdict(options.columns), options.length, prepared_as(options)]
    entry = CACHED.entry(
        options,
        config,
        settings,
        options.tokenizer.vocab_size,
        lambda at: _build(at, options, config.seed),
    )
    pad, facts = entry.tokens["pad"], entry.facts
    names = options.columns.names
    rows = open_sets(
        entry,
        lambda name: open_texts(entry.folder / name, names, pad),
        partial(
            open_rows, entry, options, streaming_of(options), partial(stored_texts, names, int(pad))
        ),
    )
    return with_rows(
        TextsDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources, entry.sizes)},
        entry.tokenizer,
        facts={"data": options.data, **facts},
        warnings=(
            *data_warnings(options),
            *cut_warning(facts, options.length, "texts"),
            *_untrained_size(options),
            *_length(options),
            *_prompts(options),
        ),
        group=group,
        **entry.fields,
    )


def _untrained_size(options: EmbeddingOptions) -> Iterator[str]:
    """Yield a warning if the loss never sees whole embeddings, which
    evaluation and predictions use.
    """
    size = hidden_size(options)
    if options.dims and isinstance(size, int) and size not in options.dims:
        yield (
            f"dims = {list(options.dims)}: whole embeddings, of {size} numbers, are not trained as"
            f" such; add {size}"
        )


def _length(options: EmbeddingOptions) -> Iterator[str]:
    """Yield the length that the model's folder says, where no option says one."""
    if options.max_seq_len is None and options.text_settings.length is not None:
        yield (
            f"model {options.model}: texts have up to {options.length} tokens, as its folder of"
            " sentence-transformers says; --max-seq-len names another length"
        )


def _prompts(options: EmbeddingOptions) -> Iterator[str]:
    """Yield what the model's folder does with texts, and no option asked for."""
    settings = options.text_settings
    if settings.lowers:
        yield f"model {options.model}: texts become lower case (do_lower_case)"
    roles = [role for role in options.columns.names if role not in options.prompts]
    if settings.default is not None and roles:
        yield (
            f"model {options.model}: {settings.prompt(None)!r}, its default prompt, is put before"
            f" each {' and '.join(roles)}; prompts.{roles[0]} names another, or '' for none"
        )


def _build(folder: Path, options: EmbeddingOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the
    facts of each dataset.
    """
    facts: dict[str, dict[str, int]] = {}
    placed: dict[str, Any] = {}
    if options.stream:
        stream = stream_parts(
            options, streaming_of(options), lambda source: _rows(source, options), seed, folder
        )
        parts, tokenizer, placed = stream.held_out, stream.tokenizer, stream.record
        texts = len(options.columns.names)
        facts = {
            name: {"rows": rows, "texts": rows * texts, "texts_cut": 0}
            for name, rows in stream.rows.items()
        }
    else:
        parts = read_parts(options, lambda source: _rows(source, options), seed)
        # a vocabulary must not see the evaluation rows
        tokenizer = make_tokenizer(options, parts["train"].values)
    for name, part in parts.items():
        cut = write_texts(
            folder / name, options.columns.names, encode(part.values(), tokenizer, options)
        )
        rows = len(part.numbers)
        facts[name] = {"rows": rows, "texts": rows * len(options.columns.names), "texts_cut": cut}
    if not options.stream:
        sources = source_bounds(
            options, lambda source: _rows(source, options).values, parts["train"].numbers
        )
        placed = {"sources": sources}
    return tokenizer, {"facts": facts, **placed}


def _rows(source: str, options: EmbeddingOptions) -> Groups:
    if source in EMBEDDED and options.columns.negative is not None:
        raise DataError(
            f"dataset {source}: has no negatives; leave out columns.negative, or name a file with"
            " --data"
        )
    return read_source(
        source, EMBEDDED, options.filter, lambda path: read_rows(path, schema_of(options.columns))
    )
