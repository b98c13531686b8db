"""Read, check, split and tokenize texts; cache the result by content."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import DataError
from distcore_tasks.masked_lm.dataset import Masking, open_rows, write_rows
from distcore_tasks.masked_lm.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.masked_lm.encode import encode, make_tokenizer, ordinary_tokens
from distcore_tasks.masked_lm.models import mask_token
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.rows import Texts, schema_of
from distcore_tasks.masked_lm.streamed import open_texts, streaming_of
from distcore_tasks.shared.arrays import array_blocks
from distcore_tasks.shared.bert import check_encoder
from distcore_tasks.shared.cache import CachedDatasets, cut_warning, total
from distcore_tasks.shared.jagged import Flat
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

CACHED = CachedDatasets(kind="masked", version=1, embedded=EMBEDDED, made_from=MADE_FROM)


def prepare_masked(options: MaskedOptions, config: RunConfig) -> TokenizedDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. It does not contain ``mask_probability``, because rows are masked batch by
    batch. Raises DataError, ModelError or ConfigError.
    """
    check_encoder(options, options.max_seq_len, "MASKED_LM", "does not find masked tokens")
    if options.stream:
        own = "a text is one row, which is cut to max_seq_len: --set task_options.split_texts=false"
        check_stream(options, {"split_texts": options.split_texts and own})
    settings = [asdict(options.columns), options.max_seq_len, options.split_texts]
    # a pretrained model has its own vocabulary
    size = options.tokenizer.vocab_size if options.from_scratch else 0
    entry = CACHED.entry(
        options, config, settings, size, lambda folder: _build(folder, options, config.seed)
    )
    ordinary = np.load(entry.folder / "ordinary.npy", allow_pickle=False)
    masking = Masking(
        probability=options.mask_probability,
        ordinary=ordinary,
        seed=config.seed,
        **entry.record["masking"],
    )
    facts, pad = entry.facts, entry.tokens["pad"]
    sets = open_sets(
        entry,
        lambda name: open_rows(entry.folder / name, pad, masking, varying=name == "train"),
        partial(open_texts, entry, options, masking),
    )
    stored = {name: rows for name, rows in sets.items() if name not in entry.streamed}
    for name, rows in stored.items():
        facts[name]["targets"] = int(rows.items.sum())
    empty = sum(int((rows.items == 0).sum()) for rows in stored.values())
    return with_rows(
        TokenizedDatasets,
        sets | {"train": in_order(sets["train"], options, config, entry.sources, entry.sizes)},
        entry.tokenizer,
        facts={"data": options.data, **facts},
        warnings=(*data_warnings(options), *_warnings(facts, empty, options)),
        **entry.fields,
    )


def _build(folder: Path, options: MaskedOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the
    facts of each dataset.
    """
    facts: dict[str, dict[str, object]] = {}
    placed: dict[str, Any] = {}
    if options.stream:
        stream = stream_parts(
            options, streaming_of(options), lambda source: _texts(source, options), seed, folder
        )
        parts, tokenizer, placed = stream.held_out, stream.tokenizer, stream.record
        facts = {
            name: {"texts": rows, "rows": rows, "texts_cut": 0}
            for name, rows in stream.rows.items()
        }
    else:
        parts = read_parts(options, lambda source: _texts(source, options), seed)
        # a vocabulary must not see the evaluation rows
        tokenizer = make_tokenizer(options, parts["train"].values)
    mask, ordinary = mask_token(options.model, tokenizer), ordinary_tokens(tokenizer)
    made: dict[str, array[int]] = {}
    common = None
    for name, part in parts.items():
        cut, made[name] = list[int](), array("q", [0])
        tokens = write_rows(
            folder / name, _rows_of(part, tokenizer, options, cut, made[name]), ordinary
        )
        if not options.from_scratch:
            check_vocabulary(
                options.model, options.model_folder(), int(tokens.values.max(initial=0))
            )
        counts = np.zeros(count_tokens(tokenizer), np.int64)
        counts[ordinary] = count_each(array_blocks(tokens.values), len(counts))[ordinary]
        if not counts.any():
            raise DataError(
                f"{part.rows.name}, for {name}: no token can be masked: all of them are special or"
                " unknown"
            )
        common = log_frequencies(counts=counts) if common is None else common
        facts[name] = {
            "texts": len(part.numbers),
            "rows": len(tokens.lengths),
            "tokens": len(tokens.values),
            "texts_cut": sum(cut),
        }
        if not options.stream:  # else nobody knows how often a token is there
            facts[name]["unigram_perplexity"] = unigram_perplexity(counts=counts, common=common)
            facts[name]["commonest_token"] = round(float(counts[common.argmax()] / counts.sum()), 4)
    np.save(folder / "ordinary.npy", ordinary)
    if not options.stream:
        texts = source_bounds(
            options, lambda source: _texts(source, options).values, parts["train"].numbers
        )
        placed = {"sources": np.cumsum(made["train"])[texts].tolist() if texts else []}
    return tokenizer, {
        "facts": facts,
        **placed,
        "masking": {"mask": mask, "size": count_tokens(tokenizer)},
    }


def _rows_of(
    part: Part[Texts], tokenizer: Any, options: MaskedOptions, cut: list[int], made: array[int]
) -> Iterator[Flat]:
    """Yield rows in chunks. Append to ``cut`` the number of texts cut in each, to ``made`` those of
    rows of a text.
    """
    for rows, number, of_texts in encode(part, tokenizer, options):
        cut.append(number)
        made.extend(of_texts)
        yield rows


def _texts(source: str, options: MaskedOptions) -> Texts:
    return read_source(
        source, EMBEDDED, options.filter, lambda path: read_rows(path, schema_of(options.columns))
    )


def _warnings(
    facts: dict[str, dict[str, int]], empty: int, options: MaskedOptions
) -> Iterator[str]:
    remedy = "--set task_options.split_texts=true makes several rows of each"
    yield from cut_warning(facts, options.max_seq_len, "texts", remedy=remedy)
    if empty:
        rows = total(facts, "rows")
        yield (
            f"{empty} of {rows} rows have special or unknown tokens only: they are not masked and"
            " do not count"
        )
