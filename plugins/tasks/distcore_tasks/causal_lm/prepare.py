"""From options to tokenized data sets: read, check, split and tokenize rows, and cache the result by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distcore import DataError
from distcore.data import cached_folder
from distcore_tasks.causal_lm import embedded
from distcore_tasks.causal_lm.dataset import Arrays, open_sequences
from distcore_tasks.causal_lm.encode import encode
from distcore_tasks.causal_lm.models import packs
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.rows import Rows, read_rows, texts_of
from distcore_tasks.causal_lm.shapes import PUBLISHED
from distcore_tasks.shared.pretrained import (
    check_length,
    check_vocabulary,
    load_tokenizer,
    tokenizer_digest,
    with_pad_token,
)
from distcore_tasks.shared.sources import read_source, source_digests, unused_splits
from distcore_tasks.shared.splits import Part, parts_of
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenized import TokenizedDatasets, count_tokens, tokens_of, with_rows

FORMAT = 2
"""Version of the files in a cache entry, part of its key: raise it when their layout or meaning changes."""


def prepare_rows(options: CausalOptions, seed: int, padding_free: str) -> TokenizedDatasets:
    """Return the tokenized data sets of a run; prepared once, then taken from the cache.

    ``padding_free`` is that of the config. The key of a cache entry is a digest of the files' content. Raises
    DataError, ModelError or ConfigError.
    """
    packed = packs(options, padding_free)  # what cannot be packed is refused before any file is read
    if not options.from_scratch:
        check_length(options.model, options.model_folder(), options.max_seq_len + options.max_new_tokens)
    folder = cached_folder("sequences", _key(options, seed), lambda folder: _build(folder, options, seed))
    return _open(folder, options, packed)


def _key(options: CausalOptions, seed: int) -> str:
    """Return the key of the cache entry: a digest of everything that its content depends on."""
    facts = [
        FORMAT,
        source_digests(options, embedded.EMBEDDED, embedded.fingerprint),
        [options.form, asdict(options.columns)],
        None if options.eval_data else [seed, options.eval_fraction],  # what the split depends on
        [options.max_seq_len, options.split_documents],
        _tokenizer_digest(options),
        [version("tokenizers"), version("transformers")],  # a new release may write conversations differently
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _tokenizer_digest(options: CausalOptions) -> list[Any]:
    if options.from_scratch:
        return ["byte-level", options.tokenizer.vocab_size]
    return tokenizer_digest(options.model_folder())


def _build(folder: Path, options: CausalOptions, seed: int) -> None:
    """Fill a new cache entry: one folder per data set, the tokenizer's folder, and ``entry.json``."""
    parts = _parts(options, seed)
    tokenizer = _tokenizer(options, parts["train"])  # a vocabulary must not see the evaluation rows
    facts: dict[str, dict[str, object]] = {}
    common = None
    for name, part in parts.items():
        arrays, cut = encode(part, tokenizer, options, folder / name)
        if not options.from_scratch:
            check_vocabulary(options.model, options.model_folder(), int(arrays.tokens.max(initial=0)))
        counts = count_each(arrays.targets(), count_tokens(tokenizer))
        common = log_frequencies(counts=counts) if common is None else common
        perplexity = unigram_perplexity(counts=counts, common=common)
        facts[name] = {**_facts(part, arrays, cut), "unigram_perplexity": perplexity}
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = {"facts": facts, "form": parts["train"].rows.form, "tokens": tokens_of(tokenizer)}
    (folder / "entry.json").write_text(json.dumps(entry), encoding="utf-8")


def _parts(options: CausalOptions, seed: int) -> dict[str, Part[Rows]]:
    """Return the data sets by name; raises DataError for rows of several forms."""
    parts = parts_of(options, lambda source: _rows(source, options), seed)
    first = parts["train"].rows
    for name, part in parts.items():
        if part.rows.form != first.form:
            found = f"has {part.rows.form}, but {first.name} has {first.form}"
            raise DataError(f"{part.rows.name}, for {name}: {found}: use one form for all")
    return parts


def _rows(source: str, options: CausalOptions) -> Rows:
    return read_source(source, embedded.EMBEDDED, lambda found: read_rows(found, options))


def _tokenizer(options: CausalOptions, train: Part[Rows]) -> Any:
    if not options.from_scratch:
        return with_pad_token(load_tokenizer(options.model, options.model_folder()))
    from distcore_tasks.causal_lm.vocabulary import train_tokenizer

    return train_tokenizer(texts_of(train.values()), options.tokenizer.vocab_size)


def _facts(part: Part[Rows], arrays: Arrays, cut: int) -> dict[str, object]:
    """Return what the report states of the rows of one data set."""
    return {
        "documents" if part.rows.form == "documents" else "conversations": len(part.numbers),
        "rows": len(arrays.lengths),
        "tokens": int(arrays.lengths.sum()),
        "targets": int(arrays.items().sum()),
        "rows_cut": cut,
    }


def _open(folder: Path, options: CausalOptions, packed: bool) -> TokenizedDatasets:
    """Open a cache entry that ``_build`` has filled."""
    entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    pad = int(entry["tokens"]["pad"])
    prompts = {name: 0 if name == "train" else _sampled(rows["rows"], options) for name, rows in entry["facts"].items()}
    how = {"packed": packed, "apart": options.split_documents}
    sets = {name: open_sequences(folder / name, pad, prompts=prompts[name], **how) for name in prompts}
    return with_rows(
        sets,
        folder / "tokenizer",
        facts={"data": options.data, "form": entry["form"], "packing": packed, **entry["facts"]},
        warnings=tuple(_warnings(entry["facts"], options)),
        **entry["tokens"],
    )


def _sampled(rows: int, options: CausalOptions) -> int:
    """Return how many of an evaluation's rows the model goes on from."""
    return min(rows, options.samples or rows) if options.max_new_tokens else 0


def _warnings(facts: dict[str, dict[str, int]], options: CausalOptions) -> Iterator[str]:
    yield from unused_splits(options)
    cut, rows = (sum(part[name] for part in facts.values()) for name in ("rows_cut", "rows"))
    if cut:
        length = options.max_seq_len
        yield f"{cut} of {rows} rows have more than {length} tokens and are cut; --max-seq-len sets another length"
    if options.model in PUBLISHED:
        where = f"--model openai-community/{options.model} takes the published ones"
        yield f"model {options.model}: built in, begins with random weights; {where}"
