"""Read, check, split and tokenize rows; cache the result by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import DataError
from distcore_tasks.causal_lm.conversations import ChatTemplate
from distcore_tasks.causal_lm.dataset import Arrays, SequenceDataset, open_sequences
from distcore_tasks.causal_lm.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.causal_lm.encode import documents_of, encode, make_tokenizer
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.rows import (
    TextRows,
    read_rows,
    schema_of,
    unread_columns,
    unread_keys,
)
from distcore_tasks.causal_lm.sequence_packing import pack_dataset
from distcore_tasks.causal_lm.shapes import PUBLISHED
from distcore_tasks.causal_lm.streamed import (
    StreamedSequences,
    one_row_per_sequence,
    open_corpus,
    streaming_of,
)
from distcore_tasks.causal_lm.streamed_blocks import BlockLengths, open_blocks, write_blocks
from distcore_tasks.shared.cache import CachedDatasets, Entry, cut_warning, side_warning
from distcore_tasks.shared.generation.settings import check_settings
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.pretrained import (
    check_length,
    check_vocabulary,
    load_tokenizer,
)
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.sources import data_warnings, read_source, source_file
from distcore_tasks.shared.splits import Part, read_parts
from distcore_tasks.shared.streams.preparing import (
    StreamParts,
    check_stream,
    open_sets,
    read_stream_parts,
)
from distcore_tasks.shared.streams.values import open_values
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenized import TokenizedDatasets, count_tokens, with_rows

if TYPE_CHECKING:
    from distcore import RunConfig

_UNITS = {"documents": "documents", "prompts": "conversations", "messages": "conversations"}
"""Names of the values of each form in the facts of a run."""
CACHED = CachedDatasets(kind="sequences", version=5, embedded=EMBEDDED, made_from=MADE_FROM)


def prepare_rows(options: CausalOptions, config: RunConfig) -> TokenizedDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. Raises DataError, ModelError or ConfigError.
    """
    packed = options.packs(config)  # first, so that packing is refused before any file is read
    if options.stream:
        own = "each document is a row of its own already; leave it out"
        check_stream(options, {"split_documents": options.split_documents and own})
    if not options.from_scratch:
        check_length(
            options.model, options.model_folder(), options.max_seq_len + options.max_new_tokens
        )
    if options.max_new_tokens:
        check_settings(
            options.model,
            None if options.from_scratch else options.model_folder(),
            options.generation,
        )
    settings = [
        options.form,
        asdict(options.columns),
        options.max_seq_len,
        options.split_documents,
        options.end_documents,
    ]
    size = options.tokenizer.vocab_size
    entry = CACHED.entry(
        options, config, settings, size, lambda folder: _build(folder, options, config.seed)
    )
    return _open(entry, options, config, packed)


def _build(folder: Path, options: CausalOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the
    facts of each dataset.
    """
    facts: dict[str, dict[str, object]] = {}
    placed: dict[str, Any] = {}
    if options.stream:
        corpus = _rows(options.data, options)
        form, own = corpus.form, replace(options, form=corpus.form)
        parts_of = partial(read_stream_parts, options, streaming_of(form, options), corpus)
        stream = parts_of(lambda source: _rows(source, own), seed, folder)
        parts, tokenizer, placed = stream.held_out, stream.tokenizer, stream.record
        facts = {name: _streamed_facts(stream, own, folder, name) for name in stream.rows}
    else:
        parts = _parts(options, seed)
        train = parts["train"]
        form = train.rows.form
        # a vocabulary must not see the evaluation rows
        tokenizer = make_tokenizer(options, train.values)
    common = None
    for name, part in parts.items():
        bounds = partial(_bounds, options) if name == "train" else _no_bounds
        write = partial(
            encode, tokenizer=tokenizer, options=options, folder=folder / name, sources=bounds
        )
        part, (arrays, cut, rows) = part.encoded(folder / name, write)
        placed = {"sources": rows} if name == "train" else placed
        if not options.from_scratch:
            check_vocabulary(
                options.model, options.model_folder(), int(arrays.tokens.max(initial=0))
            )
        counts = count_each(arrays.targets(), count_tokens(tokenizer))
        common = log_frequencies(counts=counts) if common is None else common
        facts[name] = _facts(part, arrays, cut)
        if "train" in parts:  # else nobody knows how often a token is there
            facts[name]["unigram_perplexity"] = unigram_perplexity(counts=counts, common=common)
    said: list[str] = []
    if form == "messages":
        read = [corpus] if options.stream else [part.rows for part in parts.values()]
        said = [
            *ChatTemplate(tokenizer).warnings({"messages": []}),
            *dict.fromkeys(unread_keys(read, tokenizer)),
        ]
    return tokenizer, {"facts": facts, **placed, "form": form, "chat_template": said}


def _parts(options: CausalOptions, seed: int) -> dict[str, Part[TextRows]]:
    """Return the datasets by name. Raises DataError if their forms differ."""
    parts = read_parts(options, lambda source: _rows(source, options), seed)
    first = parts["train"].rows
    for name, part in parts.items():
        if part.rows.form != first.form:
            forms = f"has {part.rows.form}, but {first.name} has {first.form}"
            raise DataError(f"{part.rows.name}, for {name}: {forms}: use one form for all")
    return parts


def _rows(source: str, options: CausalOptions) -> TextRows:
    return read_source(source, EMBEDDED, options.filter, lambda path: read_rows(path, options))


def _bounds(options: CausalOptions, numbers: np.ndarray) -> list[int]:
    return source_bounds(options, lambda source: _rows(source, options), numbers)


def _no_bounds(numbers: np.ndarray) -> list[int]:
    return []


def _facts(part: Part[TextRows], arrays: Arrays, cut: int) -> dict[str, object]:
    """Return the facts of one dataset for the report."""
    return {
        _UNITS[part.rows.form]: len(part.numbers),
        "rows": len(arrays.lengths),
        "tokens": int(arrays.lengths.sum()),
        "targets": int(arrays.items().sum()),
        "rows_cut": cut,
    }


def _streamed_facts(
    stream: StreamParts[TextRows], options: CausalOptions, folder: Path, name: str
) -> dict[str, object]:
    """Return the facts of one dataset of a stream; of documents that are evaluated, write
    where each block begins.
    """
    form, rows = options.form, stream.rows[name]
    assert form != "auto"
    facts: dict[str, object] = {_UNITS[form]: rows, "rows": rows, "rows_cut": 0}
    if form != "documents" or name == "train" or name not in stream.record["streamed"]:
        return facts
    source = source_file(options.sources[name], EMBEDDED, options.filter)
    values = open_values(source, schema_of(form, options.columns), folder / name)
    tokens = write_blocks(
        documents_of(values, stream.tokenizer, options), options.max_seq_len, folder / name
    )
    return facts | {
        "rows": len(BlockLengths(tokens, options.max_seq_len)),
        "tokens": tokens,
        "targets": tokens,
    }


def _open(
    entry: Entry, options: CausalOptions, config: RunConfig, packed: bool
) -> TokenizedDatasets:
    """Open a cache entry that ``_build`` filled."""
    pad, facts = int(entry.tokens["pad"]), entry.facts
    prompts = {
        name: 0 if name == "train" else _count_samples(rows["rows"], options)
        for name, rows in facts.items()
    }
    layout = (
        partial(pack_dataset, split_documents=options.split_documents)
        if packed
        else one_row_per_sequence
    )

    def stored(name: str) -> SequenceDataset:
        rows = open_sequences(entry.folder / name, pad, prompts=prompts[name])
        return layout(in_order(rows, options, config, entry.sources) if name == "train" else rows)

    def streamed(name: str) -> StreamedSequences:
        rows = open_corpus(entry, options, layout, name, prompts[name])
        has_blocks = "tokens" in facts[name]
        return open_blocks(rows, entry.folder / name, facts[name]["tokens"]) if has_blocks else rows

    sets = open_sets(entry, stored, streamed)
    if options.stream:
        sets["train"] = in_order(sets["train"], options, config, entry.sources, entry.sizes)
    return with_rows(
        TokenizedDatasets,
        sets,
        entry.tokenizer,
        facts={"data": options.data, "form": entry.record["form"], "packing": packed, **facts}
        | _source(entry, options),
        warnings=(
            *data_warnings(options),
            *unread_columns(options, entry.record["form"], EMBEDDED),
            *entry.record["chat_template"],
            *_warnings(facts, options),
        ),
        answer_ends=_answer_ends(entry, options),
        **entry.fields,
    )


def _answer_ends(entry: Entry, options: CausalOptions) -> tuple[int, ...]:
    """Return the tokens with which conversations end an answer; none without conversations."""
    if entry.record["form"] != "messages":
        return ()
    return tuple(ChatTemplate(load_tokenizer(options.model, entry.tokenizer)).ends())


def _source(entry: Entry, options: CausalOptions) -> dict[str, str]:
    """Return what the rows of documents are, for the lines before the first step."""
    kind = "a document" if options.stream else f"a window of at most {options.max_seq_len} tokens"
    windows = f"{options.data}, each {kind}"
    return {"source": windows} if entry.record["form"] == "documents" else {}


def _count_samples(rows: int, options: CausalOptions) -> int:
    """Return the number of evaluation rows for which text is generated."""
    return min(rows, options.samples or rows) if options.max_new_tokens else 0


def _warnings(facts: dict[str, dict[str, int]], options: CausalOptions) -> Iterator[str]:
    yield from cut_warning(facts, options.max_seq_len)
    yield from side_warning(facts, options)
    if options.model in PUBLISHED:
        where = f"--model openai-community/{options.model} takes the published ones"
        yield f"model {options.model}: built in, begins with random weights; {where}"
