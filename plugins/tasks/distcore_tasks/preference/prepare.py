"""Read, check, split and tokenize preferences; cache the result by content."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.preference.dataset import open_preferences, write_preferences
from distcore_tasks.preference.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.preference.encode import encode
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.preference.rows import Preferences, schema_of
from distcore_tasks.shared.cache import CachedDatasets, cut_warning
from distcore_tasks.shared.jagged import Flat
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.pretrained import check_length, check_vocabulary, load_tokenizer, set_pad_token
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.source_rows import read_rows
from distcore_tasks.shared.sources import data_warnings, read_source
from distcore_tasks.shared.splits import Part, Refuse, read_parts
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows

if TYPE_CHECKING:
    from distcore import RunConfig

CACHED = CachedDatasets(kind="preferences", version=1, embedded=EMBEDDED, made_from=MADE_FROM)


def prepare_preferences(options: PairOptions, config: RunConfig) -> TokenizedDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its libraries' versions.
    Raises DataError, ModelError or ConfigError.
    """
    if not options.from_scratch:
        check_length(options.model, options.model_folder(), options.max_seq_len)
    settings = [asdict(options.columns), options.max_seq_len]
    entry = CACHED.entry(
        options,
        config.seed,
        settings,
        options.tokenizer.vocab_size,
        lambda folder: _build(folder, options, config.seed),
    )
    pad, facts = entry.tokens["pad"], entry.facts
    rows = {name: open_preferences(entry.folder / name, pad, mismatched=options.mismatched) for name in facts}
    return with_rows(
        TokenizedDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources)},
        entry.tokenizer,
        facts={"data": options.data, **facts},
        warnings=(*data_warnings(options), *cut_warning(facts, options.max_seq_len)),
        **entry.fields,
    )


def _build(folder: Path, options: PairOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the facts of each dataset."""
    parts = read_parts(options, lambda source: _rows(source, options), seed)
    tokenizer = _make_tokenizer(options, parts["train"])  # a vocabulary must not see the evaluation rows
    facts: dict[str, dict[str, int]] = {}

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
    sources = source_bounds(options, lambda source: _rows(source, options).values, parts["train"].numbers)
    return tokenizer, {"facts": facts, "sources": sources}


def _rows(source: str, options: PairOptions) -> Preferences:
    return read_source(source, EMBEDDED, options.filter, lambda path: read_rows(path, schema_of(options.columns)))


def _make_tokenizer(options: PairOptions, train: Part[Preferences]) -> Any:
    if not options.from_scratch:
        return set_pad_token(load_tokenizer(options.model, options.model_folder()))
    return train_tokenizer(chain.from_iterable(train.values()), options.tokenizer.vocab_size)
