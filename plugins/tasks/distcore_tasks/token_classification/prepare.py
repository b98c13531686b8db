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
    options_of_rows = [asdict(options.columns), options.max_seq_len]
    build = partial(_build, options=options, seed=config.seed)
    entry = CACHED.entry(options, config, options_of_rows, options.tokenizer.vocab_size, build)
    labels = tuple(entry.record["labels"])
    classes = tuple(map(str, labels))
    pad = int(entry.tokens["pad"])
    source_labels = {name: source_label(options.sources[name], options) for name in entry.facts}
    datasets = open_sets(
        entry,
        lambda name: open_tagged(entry.folder / name, pad, source_labels[name]),
        lambda name: open_streamed(entry, options, classes, pad, name, source_labels[name]),
    )
    datasets["train"] = in_order(datasets["train"], options, config, entry.sources, entry.sizes)
    return with_rows(
        TagDatasets,
        datasets,
        entry.tokenizer,
        facts={"data": options.data, "tags": list(classes), "iob": is_iob(classes), **entry.facts},
        warnings=(
            *data_warnings(options),
            *other_head(classes, options),
            *_warnings(entry.facts, options),
        ),
        classes=classes,
        labels=labels,
        **entry.fields,
    )


def _build(folder: Path, options: TagOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the record of
    the entry: tags, facts of each dataset, and what tells the sources of a mixture apart.
    """
    read = partial(_rows, options=options)
    rows = read(options.data)
    labels = in_order_of_head(distinct_tags(rows), options)
    classes = [str(label) for label in labels]
    facts: dict[str, dict[str, object]] = {}
    record: dict[str, Any] = {}
    baseline = None
    if options.stream:
        streaming = streaming_of(options, classes)
        stream = read_stream_parts(options, streaming, rows, read, seed, folder)
        tokenizer = stream.tokenizer
        record = stream.record
        # Streamed rows are encoded when their step comes, so nobody has counted their words yet.
        for name, row_count in stream.rows.items():
            facts[name] = {"rows": row_count, "words": 0, "words_cut": 0}
        stored_parts = stream.held_out
    else:

        def read_once(source: str) -> Tagged:
            # The tags are from these rows already: do not read that file again.
            return rows if source == options.data else read(source)

        stored_parts = read_parts(options, read_once, seed)
        train = stored_parts["train"]
        # Of the training rows alone: a vocabulary must not see the evaluation rows.
        tokenizer = make_tokenizer(options, train.values)
        baseline = Lookup(train.values())
    for name, part in stored_parts.items():
        write = partial(
            _write_part, folder=folder / name, classes=classes, tokenizer=tokenizer, options=options
        )
        accepted_part, facts[name] = part.encoded(folder / name, write)
        # Without bad rows that are passed over, which source_bounds must not count.
        stored_parts[name] = accepted_part
        if baseline and name != "train":
            facts[name] |= baseline.facts(accepted_part.values(), classes)
    if not options.stream:
        train_numbers = stored_parts["train"].numbers
        record["sources"] = source_bounds(options, read, train_numbers)
    return tokenizer, {"labels": labels, "facts": facts, **record}


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
        for rows in chunks(encode_tags(part.values(), classes, refuse)):
            words = tokenize_words(tokenizer, [row for row, _ in rows], options.max_seq_len)
            judged_counts = check_judged(words, refuse, totals["rows"], options)
            files.add(words, [tags for _, tags in rows])
            totals.update(
                rows=len(rows),
                tokens=len(words.tokens.values),
                words=int(words.count.sum()),
                words_cut=int((words.count - judged_counts).sum()),
            )
    # A row is (words, tags), or (words, tags, id) if there is a column of ids.
    ids = [row_id for _, _, *optional_id in part.values() for row_id in optional_id]
    # As users count the rows of their file: from 1.
    row_numbers = [part.rows.number(place) + 1 for place in part.numbers.tolist()]
    finish_tagged(folder, row_numbers, ids or None)
    return dict(totals)


def _rows(source: str, options: TagOptions) -> Tagged:
    """Return the rows of a source, which are read now, or by number if rows are streamed."""
    most_bad_rows = options.skip_bad_rows if options.stream else None
    return read_source(
        source,
        EMBEDDED,
        options.filter,
        lambda path: read_tagged(path, options.columns, most_bad_rows),
    )


def _warnings(facts: dict[str, dict[str, int]], options: TagOptions) -> Iterator[str]:
    """Yield a line if words are neither learned nor judged."""
    cut = total(facts, "words_cut")
    if cut:
        where = f"stand behind the {options.max_seq_len} tokens of their row, or have none"
        learned = "they are neither learned nor judged; --max-seq-len sets another length"
        yield f"{cut} of {total(facts, 'words')} words {where}: {learned}"
