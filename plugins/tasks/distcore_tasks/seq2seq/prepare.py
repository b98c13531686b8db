"""From options to tokenized pairs: read, check, split and tokenize rows, and cache the result by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from distcore.data import array_blocks, cached_folder
from distcore_tasks.seq2seq import embedded
from distcore_tasks.seq2seq.dataset import open_pairs
from distcore_tasks.seq2seq.encode import encode
from distcore_tasks.seq2seq.models import check_model
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.rows import Pairs, read_pairs
from distcore_tasks.seq2seq.scores import check_scores
from distcore_tasks.shared.pretrained import check_vocabulary, load_tokenizer, tokenizer_digest
from distcore_tasks.shared.sources import read_source, source_digests, unused_splits
from distcore_tasks.shared.splits import Part, parts_of
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenized import TokenizedDatasets, count_tokens, tokens_of, with_rows

FORMAT = 1
"""Version of the files in a cache entry, part of its key: raise it when their layout or meaning changes."""


def prepare_pairs(options: Seq2SeqOptions, seed: int) -> TokenizedDatasets:
    """Return the tokenized data sets of a run; prepared once, then taken from the cache.

    The key of a cache entry is a digest of the files' content. Raises DataError, ModelError or ConfigError.
    """
    if options.max_new_tokens:
        check_scores()
    check_model(options)
    folder = cached_folder("pairs", _key(options, seed), lambda folder: _build(folder, options, seed))
    entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    facts = entry["facts"]
    sets = {name: open_pairs(folder / name, entry["tokens"]["pad"], texts=name != "train") for name in facts}
    return with_rows(
        sets,
        folder / "tokenizer",
        facts={"data": options.data, **facts},
        warnings=tuple(_warnings(facts, options)),
        **entry["tokens"],
    )


def _key(options: Seq2SeqOptions, seed: int) -> str:
    """Return the key of the cache entry: a digest of everything that its content depends on."""
    tokens = tokenizer_digest(options.model_folder()) if not options.from_scratch else options.tokenizer.vocab_size
    facts = [
        FORMAT,
        source_digests(options, embedded.EMBEDDED, embedded.fingerprint),
        None if options.eval_data else [seed, options.eval_fraction],  # what the split depends on
        [asdict(options.columns), options.prefix, options.max_seq_len, options.max_target_len],
        [tokens, version("tokenizers"), version("transformers")],  # a new release may tokenize differently
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _build(folder: Path, options: Seq2SeqOptions, seed: int) -> None:
    """Fill a new cache entry: one folder per data set, the tokenizer's folder, and ``entry.json``."""
    parts = parts_of(options, lambda source: _rows(source, options), seed)
    tokenizer = _tokenizer(options, parts["train"])  # a vocabulary must not see the evaluation rows
    facts: dict[str, dict[str, object]] = {}
    common = commonest = None
    for name, part in parts.items():
        source, target, cut = encode(part, tokenizer, options, folder / name)
        if not options.from_scratch:
            largest = max(int(flat.values.max(initial=0)) for flat in (source, target))
            check_vocabulary(options.model, options.model_folder(), largest)
        counts = count_each(array_blocks(target.values), count_tokens(tokenizer))
        common = log_frequencies(counts=counts) if common is None else common
        said = _numbers(part)
        commonest = _commonest(said) if commonest is None else commonest
        facts[name] = {
            "rows": len(part.numbers),
            "tokens": len(source.values),
            "targets": len(target.values),
            **cut,
            "unigram_perplexity": unigram_perplexity(counts=counts, common=common),
            "commonest_target": round(float(np.mean(said == commonest)), 4),
        }
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = {"facts": facts, "tokens": tokens_of(tokenizer)}
    (folder / "entry.json").write_text(json.dumps(entry), encoding="utf-8")


def _rows(source: str, options: Seq2SeqOptions) -> Pairs:
    return read_source(source, embedded.EMBEDDED, lambda found: read_pairs(found, options.columns))


def _tokenizer(options: Seq2SeqOptions, train: Part[Pairs]) -> Any:
    if not options.from_scratch:
        return load_tokenizer(options.model, options.model_folder())
    from distcore_tasks.seq2seq.vocabulary import train_tokenizer

    return train_tokenizer(chain.from_iterable(train.values()), options.tokenizer.vocab_size)


def _numbers(part: Part[Pairs]) -> np.ndarray:
    """Return a number for the target of each row, uint64 ``(rows,)``: another one for another text."""
    digests = (hashlib.blake2b(target.encode(), digest_size=8).digest() for _, target in part.values())
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64, len(part.numbers))


def _commonest(numbers: np.ndarray) -> int:
    """Return the commonest of them, the first of those that are equally common: always writing that is a baseline."""
    found, first, counts = np.unique(numbers, return_index=True, return_counts=True)
    return int(found[np.lexsort((first, -counts))[0]])


def _warnings(facts: dict[str, dict[str, int]], options: Seq2SeqOptions) -> Iterator[str]:
    yield from unused_splits(options)
    rows = sum(part["rows"] for part in facts.values())
    for name, length, setting in (
        ("sources", options.max_seq_len, "--max-seq-len"),
        ("targets", options.max_target_len, "--set task_options.max_target_len=N"),
    ):
        if cut := sum(part[f"{name}_cut"] for part in facts.values()):
            yield f"{cut} of {rows} {name} have more than {length} tokens and are cut; {setting} sets another length"
