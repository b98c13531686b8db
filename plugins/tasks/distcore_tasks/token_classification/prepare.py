"""Read, check, split and tokenize rows; cache the result by content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_tasks.shared.bert import check_encoder
from distcore_tasks.shared.cache import CachedDatasets, total
from distcore_tasks.shared.classification.heads import in_order_of_head, other_head
from distcore_tasks.shared.lazy_rows import LazyValues
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.pretrained import check_vocabulary
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.sources import data_warnings, read_source, source_label
from distcore_tasks.shared.splits import Part, Refuse, read_parts
from distcore_tasks.shared.tokenize_rows import chunks
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows
from distcore_tasks.token_classification.dataset import TaggedFiles, finish_tagged, open_tagged
from distcore_tasks.token_classification.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.token_classification.encode import Words, load_words_tokenizer, tokenize_words
from distcore_tasks.token_classification.metrics import Lookup, is_iob
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.rows import Tag, Tagged, distinct_tags, encode_tags, read_tagged

if TYPE_CHECKING:
    from distcore import RunConfig

CACHED = CachedDatasets(kind="tagged", version=2, embedded=EMBEDDED, made_from=MADE_FROM)


@dataclass(frozen=True, kw_only=True)
class TagDatasets(TokenizedDatasets):
    """Tagged words with their tokenizer."""

    classes: tuple[str, ...]
    """Names of the tags in the order of class numbers."""
    labels: tuple[Tag, ...]
    """The tags in the data file: integers or strings."""


def prepare_tagged(options: TagOptions, config: RunConfig) -> TagDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its libraries' versions.
    Raises DataError, ModelError or ConfigError.
    """
    check_encoder(options, options.max_seq_len, "TOKEN_CLASSIFICATION", "does not tag tokens")
    settings = [asdict(options.columns), options.max_seq_len]
    size = options.tokenizer.vocab_size
    entry = CACHED.entry(options, config.seed, settings, size, lambda folder: _build(folder, options, config.seed))
    labels, facts, pad = tuple(entry.record["labels"]), entry.facts, int(entry.tokens["pad"])
    classes = tuple(map(str, labels))
    rows = {name: open_tagged(entry.folder / name, pad, source_label(options.sources[name], options)) for name in facts}
    return with_rows(
        TagDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources)},
        entry.tokenizer,
        facts={"data": options.data, "tags": list(classes), "iob": is_iob(classes), **facts},
        warnings=(*data_warnings(options), *other_head(classes, options), *_warnings(facts, options)),
        classes=classes,
        labels=labels,
        **entry.fields,
    )


def _build(folder: Path, options: TagOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and a record of tags and facts."""
    parts = read_parts(options, lambda source: _rows(source, options), seed)
    train = parts["train"]
    labels = in_order_of_head(distinct_tags(train.rows), options)
    classes = [str(label) for label in labels]
    tokenizer = _make_tokenizer(options, train)  # a vocabulary must not see the evaluation rows
    lookup = Lookup(train.values())
    facts = {}
    for name, part in parts.items():
        own = partial(_write_part, folder=folder / name, classes=classes, tokenizer=tokenizer, options=options)
        part, facts[name] = part.encoded(folder / name, own)
        parts[name] = part
        if name != "train":
            facts[name] |= lookup.facts(part.values(), classes)
    sources = source_bounds(options, lambda source: _rows(source, options).values, parts["train"].numbers)
    return tokenizer, {"labels": labels, "facts": facts, "sources": sources}


def _write_part(
    part: Part[Tagged], refuse: Refuse, folder: Path, classes: list[str], tokenizer: Any, options: TagOptions
) -> dict[str, object]:
    """Tokenize and write one dataset, in chunks of rows. Return its facts for the report."""
    totals = Counter(rows=0, tokens=0, words=0, words_cut=0)
    with TaggedFiles(folder) as files:
        for some in chunks(encode_tags(part.values(), classes, refuse)):
            words = tokenize_words(tokenizer, [row for row, _ in some], options.max_seq_len)
            judged = _check_judged(words, refuse, totals["rows"], options)
            files.add(words, [tags for _, tags in some])
            totals.update(rows=len(some), tokens=len(words.tokens.values), words=int(words.count.sum()))
            totals["words_cut"] += int((words.count - judged).sum())
    ids = None if part.rows.ids is None else [part.rows.ids[number] for number in part.numbers]
    finish_tagged(folder, [part.rows.number(number) + 1 for number in part.numbers.tolist()], ids)
    return dict(totals)


def _check_judged(words: Words, refuse: Refuse, start: int, options: TagOptions) -> np.ndarray:
    """Return the number of words of each row with a token, int64 ``(rows,)``. ``start``: number of the first row.

    Refuses rows without any. Raises ModelError for a token outside the model's vocabulary.
    """
    judged = words.count_judged()
    for empty in np.flatnonzero(judged == 0).tolist():
        refuse(start + empty, f"no word of it is left: raise --max-seq-len ({options.max_seq_len}), or remove the row")
    if not options.from_scratch:
        check_vocabulary(options.model, options.model_folder(), int(words.tokens.values.max(initial=0)))
    return judged


def _rows(source: str, options: TagOptions) -> Tagged:
    return read_source(source, EMBEDDED, options.filter, lambda path: read_tagged(path, options.columns))


def _make_tokenizer(options: TagOptions, train: Part[Tagged]) -> Any:
    if not options.from_scratch:
        return load_words_tokenizer(options.model, options.model_folder())
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    rows = train.values()
    texts = LazyValues(lambda: (" ".join(words) for words, *_ in rows), len(rows))
    return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))


def _warnings(facts: dict[str, dict[str, int]], options: TagOptions) -> Iterator[str]:
    if cut := total(facts, "words_cut"):
        where = f"stand behind the {options.max_seq_len} tokens of their row, or have none"
        learned = "they are neither learned nor judged; --max-seq-len sets another length"
        yield f"{cut} of {total(facts, 'words')} words {where}: {learned}"
