"""From options to tokenized data sets: read, check, split and tokenize rows, and cache the result by content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from distcore.data import cached_folder
from distcore_tasks.shared.bert import check_encoder
from distcore_tasks.shared.lazy_rows import Reread
from distcore_tasks.shared.pretrained import check_vocabulary, tokenizer_digest
from distcore_tasks.shared.sources import read_source, source_digests, source_said, unused_splits
from distcore_tasks.shared.splits import Part, parts_of
from distcore_tasks.shared.tokenize_rows import chunks
from distcore_tasks.shared.tokenized import TokenizedDatasets, tokens_of
from distcore_tasks.token_classification import embedded
from distcore_tasks.token_classification.dataset import TaggedFiles, finish_tagged, no_tagged, open_tagged
from distcore_tasks.token_classification.metrics import Lookup, is_iob
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.rows import Tag, Tagged, distinct_tags, encode_tags, read_tagged
from distcore_tasks.token_classification.words import Words, tokenize_words, words_tokenizer

FORMAT = 1
"""Version of the files in a cache entry, part of its key: raise it when their layout or meaning changes."""


@dataclass(frozen=True, kw_only=True)
class TagDatasets(TokenizedDatasets):
    """Tagged words, and the tokenizer that made the tokens."""

    classes: tuple[str, ...]
    """Names of the tags in the order of class numbers."""
    labels: tuple[Tag, ...]
    """The tags as the data file writes them: integers or strings."""


def prepare_tagged(options: TagOptions, seed: int) -> TagDatasets:
    """Return the tokenized data sets of a run; prepared once, then taken from the cache.

    The key of a cache entry is a digest of the files' content. Raises DataError, ModelError or ConfigError.
    """
    check_encoder(options, options.max_seq_len, "TOKEN_CLASSIFICATION", "does not tag tokens")
    folder = cached_folder("tagged", _key(options, seed), lambda folder: _build(folder, options, seed))
    entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    labels, facts, pad = tuple(entry["labels"]), entry["facts"], int(entry["tokens"]["pad"])
    classes = tuple(map(str, labels))
    sources = {"train": options.data, "evaluation": options.eval_data or options.data, "test": str(options.test_data)}
    sets = {name: open_tagged(folder / name, pad, source_said(sources[name], embedded.EMBEDDED)) for name in facts}
    return TagDatasets(
        train=sets["train"],
        evaluation=sets["evaluation"],
        test=sets.get("test", sets["evaluation"]),
        facts={"data": options.data, "tags": list(classes), "iob": is_iob(classes), **facts},
        warnings=(*unused_splits(options), *_warnings(facts, options)),
        classes=classes,
        labels=labels,
        tokenizer=folder / "tokenizer",
        **entry["tokens"],
    )


def without_rows(labels: tuple[Tag, ...], tokenizer: Path) -> TagDatasets:
    """Return data sets with tags and a tokenizer but no rows: enough to build a model and to predict with it."""
    found = tokens_of(words_tokenizer(str(tokenizer), tokenizer))
    rows, classes = no_tagged(found["pad"]), tuple(map(str, labels))
    return TagDatasets(
        train=rows, evaluation=rows, test=rows, classes=classes, labels=labels, tokenizer=tokenizer, **found
    )


def _key(options: TagOptions, seed: int) -> str:
    """Return the key of the cache entry: a digest of everything that its content depends on."""
    tokens = tokenizer_digest(options.model_folder()) if not options.from_scratch else options.tokenizer.vocab_size
    facts = [
        FORMAT,
        source_digests(options, embedded.EMBEDDED, embedded.fingerprint),
        None if options.eval_data else [seed, options.eval_fraction],  # what the split depends on
        [asdict(options.columns), options.max_seq_len],
        [tokens, version("tokenizers"), version("transformers")],  # a new release may tokenize differently
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _build(folder: Path, options: TagOptions, seed: int) -> None:
    """Fill a new cache entry: one folder per data set, the tokenizer's folder, and ``entry.json``."""
    parts = parts_of(options, lambda source: _rows(source, options), seed)
    train = parts["train"]
    labels = distinct_tags(train.rows)
    classes = [str(label) for label in labels]
    tokenizer = _tokenizer(options, train)  # a vocabulary must not see the evaluation rows
    lookup = Lookup(train.values())
    facts = {}
    for name, part in parts.items():
        facts[name] = _write_part(folder / name, part, classes, tokenizer, options)
        if name != "train":
            facts[name] |= lookup.facts(part.values(), classes)
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = {"labels": labels, "facts": facts, "tokens": tokens_of(tokenizer)}
    (folder / "entry.json").write_text(json.dumps(entry, ensure_ascii=False), encoding="utf-8")


def _write_part(
    folder: Path, part: Part[Tagged], classes: list[str], tokenizer: Any, options: TagOptions
) -> dict[str, object]:
    """Tokenize and write one data set, some rows at a time; return the facts that the report states about it."""
    found = Counter(rows=0, tokens=0, words=0, words_cut=0)
    with TaggedFiles(folder) as files:
        for some in chunks(encode_tags(part, classes)):
            words = tokenize_words(tokenizer, [row for row, _ in some], options.max_seq_len)
            judged = _judged(words, part, found["rows"], options)
            files.add(words, [tags for _, tags in some])
            found.update(rows=len(some), tokens=len(words.tokens.values), words=int(words.count.sum()))
            found["words_cut"] += int((words.count - judged).sum())
    ids = None if part.rows.ids is None else [part.rows.ids[number] for number in part.numbers]
    finish_tagged(folder, part.numbers + 1, ids)
    return dict(found)


def _judged(words: Words, part: Part[Tagged], start: int, options: TagOptions) -> np.ndarray:
    """Return how many words of each row have a token, int64 ``(rows,)``; the first row is number ``start`` of ``part``.

    Raises DataError for a row without any, and ModelError for a token that the model does not have.
    """
    judged = words.judged()
    if len(empty := np.flatnonzero(judged == 0)):
        problem = f"no word of it is left: raise --max-seq-len ({options.max_seq_len}), or remove the row"
        raise part.problem(start + int(empty[0]), problem)
    if not options.from_scratch:
        check_vocabulary(options.model, options.model_folder(), int(words.tokens.values.max(initial=0)))
    return judged


def _rows(source: str, options: TagOptions) -> Tagged:
    return read_source(source, embedded.EMBEDDED, lambda path: read_tagged(path, options.columns))


def _tokenizer(options: TagOptions, train: Part[Tagged]) -> Any:
    if not options.from_scratch:
        return words_tokenizer(options.model, options.model_folder())
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    rows = train.values()
    texts = Reread(lambda: (" ".join(words) for words, _ in rows), len(rows))
    return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))


def _warnings(facts: dict[str, dict[str, int]], options: TagOptions) -> Iterator[str]:
    cut, words = (sum(part[name] for part in facts.values()) for name in ("words_cut", "words"))
    if cut:
        where = f"stand behind the {options.max_seq_len} tokens of their row, or have none"
        yield f"{cut} of {words} words {where}: they are neither learned nor judged; --max-seq-len sets another length"
