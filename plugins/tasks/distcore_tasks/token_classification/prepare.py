"""Read, check, split and tokenize rows; cache the result by content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore_tasks.shared.bert import check_encoder
from distcore_tasks.shared.cache import CachedDatasets, total
from distcore_tasks.shared.classification.heads import in_order_of_head, other_head
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.sources import data_warnings, read_source, source_label
from distcore_tasks.shared.splits import Part, Refuse, read_parts
from distcore_tasks.shared.streams.preparing import check_stream, open_sets, read_stream_parts
from distcore_tasks.shared.tokenize_rows import chunks
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows
from distcore_tasks.token_classification.dataset import TaggedFiles, finish_tagged, open_tagged
from distcore_tasks.token_classification.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.token_classification.encode import check_judged, tokenize_words
from distcore_tasks.token_classification.metrics import Lookup, is_iob
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.rows import (
    Tag,
    Tagged,
    distinct_tags,
    encode_tags,
    read_tagged,
)
from distcore_tasks.token_classification.streamed import make_tokenizer, open_streamed, streaming_of

if TYPE_CHECKING:
    from distcore import RunConfig

CACHED = CachedDatasets(kind="tagged", version=3, embedded=EMBEDDED, made_from=MADE_FROM)


@dataclass(frozen=True, kw_only=True)
class TagDatasets(TokenizedDatasets):
    """Tagged words with their tokenizer."""

    classes: tuple[str, ...]
    """Names of the tags in the order of class numbers."""
    labels: tuple[Tag, ...]
    """The tags in the data file: integers or strings."""


def prepare_tagged(options: TagOptions, config: RunConfig) -> TagDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. Raises DataError, ModelError or ConfigError.
    """
    check_encoder(options, options.max_seq_len, "TOKEN_CLASSIFICATION", "does not tag tokens")
    if options.stream:
        check_stream(options, {})
    settings = [asdict(options.columns), options.max_seq_len]
    size = options.tokenizer.vocab_size
    entry = CACHED.entry(
        options, config, settings, size, lambda folder: _build(folder, options, config.seed)
    )
    labels, facts, pad = tuple(entry.record["labels"]), entry.facts, int(entry.tokens["pad"])
    classes = tuple(map(str, labels))
    names = {name: source_label(options.sources[name], options) for name in facts}
    rows = open_sets(
        entry,
        lambda name: open_tagged(entry.folder / name, pad, names[name]),
        lambda name: open_streamed(entry, options, classes, pad, name, names[name]),
    )
    return with_rows(
        TagDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources, entry.sizes)},
        entry.tokenizer,
        facts={"data": options.data, "tags": list(classes), "iob": is_iob(classes), **facts},
        warnings=(
            *data_warnings(options),
            *other_head(classes, options),
            *_warnings(facts, options),
        ),
        classes=classes,
        labels=labels,
        **entry.fields,
    )


def _build(folder: Path, options: TagOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and a
    record of tags and facts.
    """
    facts: dict[str, dict[str, object]] = {}
    placed: dict[str, Any] = {}
    lookup = None
    rows = _rows(options.data, options, options.skip_bad_rows if options.stream else None)
    labels = in_order_of_head(distinct_tags(rows), options)
    classes = [str(label) for label in labels]
    if options.stream:
        parts_of = partial(read_stream_parts, options, streaming_of(options, classes), rows)
        stream = parts_of(
            lambda source: _rows(source, options, options.skip_bad_rows), seed, folder
        )
        parts, tokenizer, placed = stream.held_out, stream.tokenizer, stream.record
        facts = {
            name: {"rows": rows, "words": 0, "words_cut": 0} for name, rows in stream.rows.items()
        }
    else:
        parts = read_parts(
            options, lambda name: rows if name == options.data else _rows(name, options), seed
        )
        train = parts["train"]
        # a vocabulary must not see the evaluation rows
        tokenizer = make_tokenizer(options, train.values)
        lookup = Lookup(train.values())
    for name, part in parts.items():
        own = partial(
            _write_part, folder=folder / name, classes=classes, tokenizer=tokenizer, options=options
        )
        part, facts[name] = part.encoded(folder / name, own)
        parts[name] = part
        if lookup and name != "train":
            facts[name] |= lookup.facts(part.values(), classes)
    if not options.stream:
        sources = source_bounds(
            options, lambda source: _rows(source, options).values, parts["train"].numbers
        )
        placed = {"sources": sources}
    return tokenizer, {"labels": labels, "facts": facts, **placed}


def _write_part(
    part: Part[Tagged],
    refuse: Refuse,
    folder: Path,
    classes: list[str],
    tokenizer: Any,
    options: TagOptions,
) -> dict[str, object]:
    """Tokenize and write one dataset, in chunks of rows. Return its facts for the report."""
    totals = Counter(rows=0, tokens=0, words=0, words_cut=0)
    with TaggedFiles(folder) as files:
        for some in chunks(encode_tags(part.values(), classes, refuse)):
            words = tokenize_words(tokenizer, [row for row, _ in some], options.max_seq_len)
            judged = check_judged(words, refuse, totals["rows"], options)
            files.add(words, [tags for _, tags in some])
            totals.update(
                rows=len(some), tokens=len(words.tokens.values), words=int(words.count.sum())
            )
            totals["words_cut"] += int((words.count - judged).sum())
    ids = [name for _, _, *named in part.values() for name in named]
    finish_tagged(
        folder, [part.rows.number(number) + 1 for number in part.numbers.tolist()], ids or None
    )
    return dict(totals)


def _rows(source: str, options: TagOptions, most_bad_rows: int | None = None) -> Tagged:
    return read_source(
        source,
        EMBEDDED,
        options.filter,
        lambda path: read_tagged(path, options.columns, most_bad_rows),
    )


def _warnings(facts: dict[str, dict[str, int]], options: TagOptions) -> Iterator[str]:
    if cut := total(facts, "words_cut"):
        where = f"stand behind the {options.max_seq_len} tokens of their row, or have none"
        learned = "they are neither learned nor judged; --max-seq-len sets another length"
        yield f"{cut} of {total(facts, 'words')} words {where}: {learned}"
