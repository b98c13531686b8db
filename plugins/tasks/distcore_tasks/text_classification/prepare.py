"""Read, check, split and tokenize texts; cache the result by content."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from distcore import ConfigError, DataError
from distcore_data import ChosenRows, Source
from distcore_tasks.shared.cache import CachedDatasets, Entry, cut_warning
from distcore_tasks.shared.classification.heads import in_order_of_head, other_head
from distcore_tasks.shared.classification.parts import LabeledPart, split_parts
from distcore_tasks.shared.lazy_rows import LazyValues, Values, picked
from distcore_tasks.shared.mixtures import source_bounds
from distcore_tasks.shared.padding import check_padding, pads_left
from distcore_tasks.shared.pretrained import check_length
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.sources import data_warnings, read_source, rows_name, source_label
from distcore_tasks.shared.streams.preparing import check_stream, open_sets
from distcore_tasks.shared.streams.values import spread
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows
from distcore_tasks.text_classification.dataset import open_tokens, write_tokens
from distcore_tasks.text_classification.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.text_classification.encode import encode_all, make_tokenizer
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.rows import LabeledTexts, read_rows
from distcore_tasks.text_classification.stream_sources import stream_rows
from distcore_tasks.text_classification.streamed import open_streamed, save_streams

if TYPE_CHECKING:
    from distcore import RunConfig

T = TypeVar("T")
CACHED = CachedDatasets(kind="tokens", version=13, embedded=EMBEDDED, made_from=MADE_FROM)


@dataclass(frozen=True, kw_only=True)
class TextDatasets(TokenizedDatasets):
    """Tokenized texts with their classes and tokenizer."""

    classes: tuple[str, ...]
    """Class names in the order of class numbers; empty for a regression."""
    labels: tuple[int | str, ...]
    """Labels of the classes in predictions: as in the data file, or ``class_names``."""


def prepare_text(options: TextOptions, config: RunConfig) -> TextDatasets:
    """Return the tokenized datasets of a run, from the cache if it has them.

    The cache key is a digest of the files, the options that shape rows, the tokenizer, and its
    libraries' versions. For an existing entry, files are read for their digest, but neither parsed
    nor tokenized. Raises DataError, ModelError or ConfigError.
    """
    if not options.from_scratch:
        check_length(options.model, options.model_folder(), options.max_seq_len)
        check_padding(options)
    if options.stream:
        check_stream(options, {})
    settings: list[object] = [
        asdict(options.used_columns),
        options.problem_type,
        options.max_seq_len,
    ]
    size = options.tokenizer.vocab_size
    entry = CACHED.entry(
        options, config, settings, size, lambda folder: _build(folder, options, config.seed)
    )
    return _open(entry, options, config)


def _rows(source: str, options: TextOptions) -> LabeledTexts:
    columns, problem = options.used_columns, options.problem

    def read(path: Source) -> LabeledTexts:
        if options.stream:
            return stream_rows(path, columns, problem, options.skip_bad_rows)
        return read_rows(path, columns, problem)

    rows = read_source(source, EMBEDDED, options.filter, read)
    if source in EMBEDDED:
        if options.problem_type != "single_label":
            raise DataError(
                f"{rows.name}: has one class per row; problem_type = {options.problem_type!r} needs"
                " a file"
            )
        if (columns.text_pair is None) != (rows.seconds is None):
            kind = (
                "one text per row, but columns.text_pair asks for two"
                if columns.text_pair
                else "pairs of texts"
            )
            raise DataError(f"{rows.name}: has {kind}; use it with rows of the same kind")
    return rows


def _picked(values: Values[T] | None, numbers: np.ndarray) -> LazyValues[T] | None:
    """Return the values of some rows, if there are any."""
    return None if values is None else picked(values, numbers)


def _build(folder: Path, options: TextOptions, seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill a new cache entry, one folder per dataset. Return the tokenizer, and the
    entry's record for ``_open``.
    """
    rows, problem = _rows(options.data, options), options.problem
    labels = in_order_of_head(problem.classes(rows), options)
    classes = [str(label) for label in labels]
    split = split_parts(
        rows,
        classes,
        partial(problem.encode, classes=classes),
        options,
        seed,
        lambda source: _rows(source, options),
    )
    parts = dict(split)
    # A vocabulary must not see the evaluation rows.
    train = parts["train"]
    count = len(train.numbers)
    sample = train.numbers[spread(0, count) if options.stream else np.arange(count)]
    tokenizer = make_tokenizer(options, picked(rows.texts, sample), _picked(rows.seconds, sample))
    judged = next(part.labels for name, part in parts.items() if name.startswith("evaluation"))
    facts = {
        name: {"rows": len(part.labels), **problem.facts(part.labels), "rows_cut": 0}
        for name, part in parts.items()
    }
    if options.stream:
        placed = save_streams(folder, parts, tokenizer, options)
    else:
        placed = {
            "sources": source_bounds(options, lambda source: _rows(source, options), sample),
            "streamed": [],
        }
    for name, part in parts.items():
        if name not in placed["streamed"]:
            facts[name] = _write_part(folder / name, part, tokenizer, options)
    return tokenizer, {
        "labels": labels,
        "type_pad": tokenizer.pad_token_type_id,
        "facts": facts,
        **placed,
        "warnings": list(problem.warnings(rows, judged, classes, options.eval_data is not None)),
    }


def _write_part(
    folder: Path, part: LabeledPart[LabeledTexts], tokenizer: Any, options: TextOptions
) -> dict[str, object]:
    """Tokenize and write one dataset. Return its facts for the report."""
    rows, chosen = part.rows, part.numbers
    if isinstance(chosen, ChosenRows):
        chosen = np.concatenate([*chosen.blocks()])
    encoded = encode_all(
        tokenizer, picked(rows.texts, chosen), _picked(rows.seconds, chosen), options
    )
    numbers = np.fromiter(map(rows.number, chosen.tolist()), np.int64, len(chosen))
    ids = _picked(rows.ids, chosen)
    lengths, cut = write_tokens(
        folder, encoded, part.labels[:], numbers, None if ids is None else [*ids]
    )
    return {
        "rows": len(lengths),
        **options.problem.facts(part.labels),
        "mean_tokens": round(float(lengths.mean()), 1),
        "rows_at_max_seq_len": int((lengths == options.max_seq_len).sum()),
        "rows_cut": cut,
    }


def _class_labels(labels: tuple[int | str, ...], options: TextOptions) -> tuple[int | str, ...]:
    """Return ``class_names`` if given, else ``labels``. Raises ConfigError for names that do
    not fit the labels.
    """
    names = options.class_names
    if names is None:
        return labels
    some = ", ".join(map(str, labels[:20])) + (", …" if len(labels) > 20 else "")
    source = rows_name(options.data, options)
    if isinstance(labels[0], str):
        raise ConfigError(
            f"class_names = {list(names)}: the labels of {source} are words already: {some}"
        )
    if len(names) != len(labels):
        raise ConfigError(
            f"class_names = {list(names)}: {len(names)} names, but {source} has {len(labels)}"
            f" classes: {some}"
        )
    return names


def _open(entry: Entry, options: TextOptions, config: RunConfig) -> TextDatasets:
    """Open a cache entry that ``_build`` filled."""
    labels, facts = _class_labels(tuple(entry.record["labels"]), options), entry.facts
    padding = {
        "pad": int(entry.tokens["pad"]),
        "pad_left": pads_left(options),
        "type_pad": entry.record["type_pad"],
    }
    names = {name: source_label(options.sources[name], options) for name in facts}
    classes = tuple(str(label) for label in labels)
    # The record names the option, not the file: the next run may have another file with
    # the same content.
    named = {"data": options.data, "eval_data": next(iter(options.held_out.values()), "")}
    warnings = [
        f"{rows_name(named[source], options)}: {line}" for source, line in entry.record["warnings"]
    ]
    rows = open_sets(
        entry,
        lambda name: open_tokens(entry.folder / name, source=names[name], **padding),
        lambda name: open_streamed(entry, options, padding, name, names[name]),
    )
    return with_rows(
        TextDatasets,
        rows | {"train": in_order(rows["train"], options, config, entry.sources, entry.sizes)},
        entry.tokenizer,
        facts={"data": options.data} | ({"classes": list(classes)} if classes else {}) | facts,
        warnings=(
            *data_warnings(options),
            *other_head(classes, options),
            *warnings,
            *cut_warning(facts, options.max_seq_len),
        ),
        classes=classes,
        labels=labels,
        **entry.fields,
    )
