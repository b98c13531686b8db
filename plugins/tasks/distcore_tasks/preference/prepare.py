"""Read, check, split and tokenize preferences; cache the result by content."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore_tasks.preference.dataset import (
    PreferenceDataset,
    open_preferences,
    write_preferences,
)
from distcore_tasks.preference.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.preference.encode import encode, make_tokenizer
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.preference.rows import Preferences, schema_of
from distcore_tasks.preference.streamed import open_streamed, streaming_of
from distcore_tasks.shared.cache import CachedDatasets, cut_warning, side_warning
from distcore_tasks.shared.jagged import Flat
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.pretrained import check_length, check_vocabulary
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.source_rows import read_rows
from distcore_tasks.shared.sources import data_warnings, read_source
from distcore_tasks.shared.splits import Part, Refuse, read_parts
from distcore_tasks.shared.streams.preparing import check_stream, open_sets, stream_parts
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows

if TYPE_CHECKING:
    from distcore import RunConfig

CACHED = CachedDatasets(kind="preferences", version=3, embedded=EMBEDDED, made_from=MADE_FROM)


def prepare_preferences(options: PairOptions, config: RunConfig) -> TokenizedDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. Raises DataError, ModelError or ConfigError.
    """
    if not options.from_scratch:
        check_length(options.model, options.model_folder(), options.max_seq_len)
    if options.stream:
        check_stream(options, {})
    options_of_rows = [asdict(options.columns), options.max_seq_len]
    build = partial(_build, options=options, seed=config.seed)
    entry = CACHED.entry(options, config, options_of_rows, options.tokenizer.vocab_size, build)

    def open_stored(name: str) -> PreferenceDataset:
        pad = entry.tokens["pad"]
        return open_preferences(entry.folder / name, pad, mismatched=options.mismatched)

    datasets = open_sets(entry, open_stored, partial(open_streamed, entry, options))
    datasets["train"] = in_order(datasets["train"], options, config, entry.sources, entry.sizes)
    return with_rows(
        TokenizedDatasets,
        datasets,
        entry.tokenizer,
        facts={"data": options.data, **entry.facts},
        warnings=(
            *data_warnings(options),
            *cut_warning(entry.facts, options.max_seq_len),
            *side_warning(entry.facts, options),
        ),
        **entry.fields,
    )


def _build(folder: Path, options: PairOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the record of
    the entry: facts of each dataset, and what tells the sources of a mixture apart.
    """
    read = partial(_rows, options=options)
    facts: dict[str, dict[str, int]] = {}
    record: dict[str, Any] = {}
    if options.stream:
        stream = stream_parts(options, streaming_of(options), read, seed, folder)
        tokenizer = stream.tokenizer
        record = stream.record
        # Streamed rows are encoded when their step comes, so nobody knows yet which will be cut.
        for name, row_count in stream.rows.items():
            facts[name] = {"rows": row_count, "rows_cut": 0}
        stored_parts = stream.held_out
    else:
        stored_parts = read_parts(options, read, seed)
        # Of the training rows alone: a vocabulary must not see the evaluation rows.
        tokenizer = make_tokenizer(options, stored_parts["train"].values)

    def encode_part(part: Part[Preferences], refuse: Refuse) -> tuple[dict[str, Flat], int]:
        return encode(part.values(), refuse, tokenizer, options.max_seq_len)

    for name, part in stored_parts.items():
        accepted_part, (texts, rows_cut) = part.encoded(folder / name, encode_part)
        # Without bad rows that are passed over, which source_bounds must not count.
        stored_parts[name] = accepted_part
        if not options.from_scratch:
            largest_token = max(int(flat.values.max(initial=0)) for flat in texts.values())
            check_vocabulary(options.model, options.model_folder(), largest_token)
        write_preferences(folder / name, texts)
        tokens = {f"{text_name}_tokens": len(flat.values) for text_name, flat in texts.items()}
        facts[name] = {"rows": len(accepted_part.numbers), **tokens, "rows_cut": rows_cut}
    if not options.stream:
        train_numbers = stored_parts["train"].numbers
        record["sources"] = source_bounds(options, read, train_numbers)
    return tokenizer, {"facts": facts, **record}


def _rows(source: str, options: PairOptions) -> Preferences:
    """Return the rows of a source. Raises DataError for rows from which nothing can be learned."""
    schema = schema_of(options.columns)
    return read_source(source, EMBEDDED, options.filter, partial(read_rows, schema=schema))
