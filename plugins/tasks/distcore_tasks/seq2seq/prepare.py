"""Read, check, split and tokenize pairs; cache the result by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_tasks.seq2seq.dataset import open_pairs
from distcore_tasks.seq2seq.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.seq2seq.encode import encode, make_tokenizer
from distcore_tasks.seq2seq.languages import languages_of, say_languages, special_tokens_of
from distcore_tasks.seq2seq.models import check_capacity, check_model
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.rows import Pairs, schema_of
from distcore_tasks.seq2seq.scores import check_scores
from distcore_tasks.seq2seq.streamed import open_streamed, streaming_of
from distcore_tasks.shared.arrays import array_blocks
from distcore_tasks.shared.cache import CachedDatasets, cut_warning
from distcore_tasks.shared.generation.settings import check_settings
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.pretrained import check_vocabulary
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.source_rows import read_rows
from distcore_tasks.shared.sources import data_warnings, read_source
from distcore_tasks.shared.splits import Part, read_parts
from distcore_tasks.shared.streams.preparing import check_stream, open_sets, stream_parts
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenized import TokenizedDatasets, count_tokens, with_rows

if TYPE_CHECKING:
    from distcore import RunConfig

CACHED = CachedDatasets(kind="pairs", version=2, embedded=EMBEDDED, made_from=MADE_FROM)


def prepare_pairs(options: Seq2SeqOptions, config: RunConfig) -> TokenizedDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. Raises DataError, ModelError or ConfigError.
    """
    if options.max_new_tokens:
        check_scores()
        check_settings(
            options.model,
            None if options.from_scratch else options.model_folder(),
            options.generation,
        )
    check_model(options)
    if options.stream:
        check_stream(options, {})
    check_capacity(options, config.global_batch_size)
    settings = [
        asdict(options.columns),
        options.prefix,
        options.max_seq_len,
        options.max_target_len,
    ]
    settings += [options.source_lang, options.target_lang]
    size = options.tokenizer.vocab_size
    entry = CACHED.entry(
        options, config, settings, size, lambda folder: _build(folder, options, config.seed)
    )
    pad, facts = entry.tokens["pad"], entry.facts
    rows = open_sets(
        entry,
        lambda name: open_pairs(entry.folder / name, pad, texts=name != "train"),
        partial(open_streamed, entry, options),
    )
    return with_rows(
        TokenizedDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources, entry.sizes)},
        entry.tokenizer,
        facts={"data": options.data, **facts},
        warnings=(
            *data_warnings(options),
            *say_languages(options, entry.record["languages"]),
            *_warnings(facts, options),
        ),
        **entry.fields,
    )


def _build(folder: Path, options: Seq2SeqOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the
    facts of each dataset.
    """
    facts: dict[str, dict[str, object]] = {}
    placed: dict[str, Any] = {}
    if options.stream:
        stream = stream_parts(
            options, streaming_of(options), lambda source: _rows(source, options), seed, folder
        )
        parts, tokenizer, placed = stream.held_out, stream.tokenizer, stream.record
        facts = {
            name: {"rows": rows, "sources_cut": 0, "targets_cut": 0}
            for name, rows in stream.rows.items()
        }
    else:
        parts = read_parts(options, lambda source: _rows(source, options), seed)
        # a vocabulary must not see the evaluation rows
        tokenizer = make_tokenizer(options, parts["train"].values)
    # M2M100's tokenizer leaves its languages out of its vocabulary.
    numbers = max(
        count_tokens(tokenizer),
        *(token + 1 for token in special_tokens_of(tokenizer, targets=True)),
        0,
    )
    common = commonest = None
    for name, part in parts.items():
        own = folder / name
        part, (source, target, cut) = part.encoded(
            own, partial(encode, tokenizer=tokenizer, options=options, folder=own)
        )
        parts[name] = part
        if not options.from_scratch:
            largest = max(int(flat.values.max(initial=0)) for flat in (source, target))
            check_vocabulary(options.model, options.model_folder(), largest)
        counts = count_each(array_blocks(target.values), numbers)
        common = log_frequencies(counts=counts) if common is None else common
        said = _numbers(part)
        commonest = _commonest(said) if commonest is None else commonest
        facts[name] = {
            "rows": len(part.numbers),
            "tokens": len(source.values),
            "targets": len(target.values),
            **cut,
        }
        if not options.stream:  # else nobody knows what is common in training
            facts[name]["unigram_perplexity"] = unigram_perplexity(counts=counts, common=common)
            facts[name]["commonest_target"] = round(float(np.mean(said == commonest)), 4)
    if not options.stream:
        sources = source_bounds(
            options, lambda source: _rows(source, options).values, parts["train"].numbers
        )
        placed = {"sources": sources}
    return tokenizer, {"facts": facts, "languages": languages_of(tokenizer), **placed}


def _rows(source: str, options: Seq2SeqOptions) -> Pairs:
    return read_source(
        source, EMBEDDED, options.filter, lambda path: read_rows(path, schema_of(options.columns))
    )


def _numbers(part: Part[Pairs]) -> np.ndarray:
    """Return a hash of the target of each row, uint64 ``(rows,)``."""
    digests = (
        hashlib.blake2b(target.encode(), digest_size=8).digest() for _, target in part.values()
    )
    return np.fromiter(
        (int.from_bytes(digest, "little") for digest in digests), np.uint64, len(part.numbers)
    )


def _commonest(numbers: np.ndarray) -> int:
    """Return the most common number; of several, the first. It is the baseline that
    always writes one target.
    """
    distinct, first, counts = np.unique(numbers, return_index=True, return_counts=True)
    return int(distinct[np.lexsort((first, -counts))[0]])


def _warnings(facts: dict[str, dict[str, int]], options: Seq2SeqOptions) -> Iterator[str]:
    for name, length, setting in (
        ("sources", options.max_seq_len, "--max-seq-len"),
        ("targets", options.max_target_len, "--set task_options.max_target_len=N"),
    ):
        yield from cut_warning(
            facts, length, name, of="rows", remedy=f"{setting} sets another length"
        )
