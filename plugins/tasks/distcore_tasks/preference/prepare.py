"""Read, check, split and tokenize preferences; cache the result by content."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore_tasks.preference.dataset import open_preferences, write_preferences
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
    settings = [asdict(options.columns), options.max_seq_len]
    entry = CACHED.entry(
        options,
        config,
        settings,
        options.tokenizer.vocab_size,
        lambda folder: _build(folder, options, config.seed),
    )
    pad, facts = entry.tokens["pad"], entry.facts
    rows = open_sets(
        entry,
        lambda name: open_preferences(entry.folder / name, pad, mismatched=options.mismatched),
        partial(open_streamed, entry, options),
    )
    return with_rows(
        TokenizedDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources, entry.sizes)},
        entry.tokenizer,
        facts={"data": options.data, **facts},
        warnings=(
            *data_warnings(options),
            *cut_warning(facts, options.max_seq_len),
            *side_warning(facts, options),
        ),
        **entry.fields,
    )


def _build(folder: Path, options: PairOptions, seed: int) -> tuple[Any, dict[str, Any]]:
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
        facts = {name: {"rows": rows, "rows_cut": 0} for name, rows in stream.rows.items()}
    else:
        parts = read_parts(options, lambda source: _rows(source, options), seed)
        # a vocabulary must not see the evaluation rows
        tokenizer = make_tokenizer(options, parts["train"].values)

    def own(part: Part[Preferences], refuse: Refuse) -> tuple[dict[str, Flat], int]:
        return encode(part.values(), refuse, tokenizer, options.max_seq_len)

    for name, part in parts.items():
        part, (texts, cut) = part.encoded(folder / name, own)
        parts[name] = part
        if not options.from_scratch:
            largest = max(int(flat.values.max(initial=0)) for flat in texts.values())
            check_vocabulary(options.model, options.model_folder(), largest)
        write_preferences(folder / name, texts)
        tokens = {f"{part_name}_tokens": len(flat.values) for part_name, flat in texts.items()}
        facts[name] = {"rows": len(part.numbers), **tokens, "rows_cut": cut}
    if not options.stream:
        sources = source_bounds(
            options, lambda source: _rows(source, options).values, parts["train"].numbers
        )
        placed = {"sources": sources}
    return tokenizer, {"facts": facts, **placed}


def _rows(source: str, options: PairOptions) -> Preferences:
    return read_source(
        source, EMBEDDED, options.filter, lambda path: read_rows(path, schema_of(options.columns))
    )
