"""From a config to tokenised data sets: read, check, split and tokenise texts, and cache the result by content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from distcore.data.cache import cached_folder
from distcore.tasks.class_checks import check_classes
from distcore.tasks.classes import distinct_labels, split_parts
from distcore.tasks.padding import check_padding, pads_left
from distcore.tasks.pretrained import check_length, check_vocabulary, load_tokenizer, pad_token, tokenizer_digest
from distcore.tasks.sources import read_source, source_digests, source_name, source_said
from distcore.tasks.text_classification.data import embedded
from distcore.tasks.text_classification.data.labelled import Rows, read_rows
from distcore.tasks.text_classification.data.tokens import empty_dataset, open_tokens, write_tokens
from distcore.tasks.text_classification.options import TextOptions
from distcore.tasks.tokenised import TokenisedDatasets, tokens_of
from distcore.tasks.tokenizing import tokenize

FORMAT = 7
"""Version of the files in a cache entry, part of its key: raise it when their layout or meaning changes."""


@dataclass(frozen=True, kw_only=True)
class TextDatasets(TokenisedDatasets):
    """Tokenised texts with their classes, and the tokenizer that made the tokens."""

    classes: tuple[str, ...]
    """Class names in the order of class numbers."""
    labels: tuple[int | str, ...]
    """The classes as the data file writes them: integers or strings."""


def prepare_text(options: TextOptions, seed: int) -> TextDatasets:
    """Return the tokenised data sets of a run; prepared once, then taken from the cache.

    The key of a cache entry is a digest of the files' content. With an entry in the cache, the files are read for
    their digest only, and neither parsed nor tokenised. Raises DataError, ModelError or ConfigError.
    """
    if not options.from_scratch:
        check_length(options.model, options.model_folder(), options.max_seq_len)
        check_padding(options)
    folder = cached_folder("tokens", _key(options, seed), lambda folder: _build(folder, options, seed))
    return _open(folder, options)


def without_rows(labels: tuple[int | str, ...], tokenizer: Path) -> TextDatasets:
    """Return data sets with classes and a tokenizer but no rows: enough to build a model and to predict with it."""
    loaded = load_tokenizer(str(tokenizer), tokenizer)
    found = tokens_of(loaded)
    rows = empty_dataset(found["pad"])
    return TextDatasets(
        train=rows,
        evaluation=rows,
        test=rows,
        classes=tuple(map(str, labels)),
        labels=labels,
        tokenizer=tokenizer,
        **found,
    )


def _key(options: TextOptions, seed: int) -> str:
    """Return the key of the cache entry: a digest of everything that its content depends on."""
    facts = [
        FORMAT,
        source_digests(options, embedded.EMBEDDED, embedded.fingerprint),
        asdict(options.columns),
        None if options.eval_data else [seed, options.eval_fraction],  # what the split depends on
        options.max_seq_len,
        _tokenizer_digest(options),
        version("tokenizers"),  # a new release may tokenise differently
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _tokenizer_digest(options: TextOptions) -> list[Any]:
    if options.from_scratch:
        return ["wordpiece", options.tokenizer.vocab_size]
    return tokenizer_digest(options.model_folder())


def _rows(source: str, options: TextOptions) -> Rows:
    return read_source(source, embedded.EMBEDDED, lambda path: read_rows(path, options.columns))


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one data set."""

    texts: list[str]
    labels: np.ndarray
    """Class number of each row, int64."""
    source_rows: np.ndarray
    """Number of each row in the file that it came from, int64, from 0."""
    ids: list[int | str] | None
    """What the user calls each row; ``None`` where no column says it."""


def _build(folder: Path, options: TextOptions, seed: int) -> None:
    """Fill a new cache entry: one folder per data set, the tokenizer's folder, and ``entry.json``."""
    rows = _rows(options.data, options)
    labels = distinct_labels(rows)
    classes = [str(label) for label in labels]
    parts = _parts(rows, classes, options, seed)
    tokenizer = _tokenizer(options, parts["train"].texts)  # a vocabulary must not see the evaluation rows
    facts = {name: _write_part(folder / name, part, tokenizer, options) for name, part in parts.items()}
    _pad_as_trained(tokenizer, pads_left(options))
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = {
        "labels": labels,
        "tokens": tokens_of(tokenizer),
        "facts": facts,
        "warnings": list(check_classes(rows, parts["evaluation"].labels, classes, options.eval_data is not None)),
    }
    (folder / "entry.json").write_text(json.dumps(entry, ensure_ascii=False), encoding="utf-8")


def _write_part(folder: Path, part: _Part, tokenizer: Any, options: TextOptions) -> dict[str, object]:
    """Tokenise and write one data set; return the facts that the report states about it."""
    tokens, lengths, cut = tokenize(tokenizer, part.texts, options.max_seq_len)
    if not options.from_scratch:
        check_vocabulary(options.model, options.model_folder(), int(tokens.max(initial=0)))
    write_tokens(folder, tokens, lengths, part.labels, part.source_rows, part.ids)
    return {
        "rows": len(lengths),
        "majority_share": round(float(np.bincount(part.labels).max() / len(lengths)), 4),
        "mean_tokens": round(float(lengths.mean()), 1),
        "rows_at_max_seq_len": int((lengths == options.max_seq_len).sum()),
        "rows_cut": cut,
    }


def _pad_as_trained(tokenizer: Any, left: bool) -> None:
    """Have the tokenizer, which an export takes along, pad with the token and on the side that training does.

    Without any special token it gets none to pad with: an ordinary one would be cut out of every text from then on.
    """
    if left:
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the latter has it saved
    if tokenizer.pad_token_id is None and tokenizer.all_special_ids:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_token(tokenizer))


def _parts(rows: Rows, classes: list[str], options: TextOptions, seed: int) -> dict[str, _Part]:
    """Return the data sets by name. Without ``--test-data`` there is no ``test``: the evaluation rows serve as test."""
    found = split_parts(rows, classes, options, seed, lambda source: _rows(source, options))
    return {name: _take(source, labels, numbers) for name, source, numbers, labels in found}


def _take(rows: Rows, labels: np.ndarray, numbers: np.ndarray) -> _Part:
    ids = None if rows.ids is None else [rows.ids[number] for number in numbers]
    return _Part([rows.texts[number] for number in numbers], labels, numbers, ids)


def _tokenizer(options: TextOptions, texts: list[str]) -> Any:
    if not options.from_scratch:
        return load_tokenizer(options.model, options.model_folder())
    from distcore.tasks.wordpiece import as_transformers, train_wordpiece

    return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))


def _cut_warning(cut: int, rows: int, max_length: int) -> list[str]:
    """Return a line that says how many of all rows were cut to ``max_length`` tokens, if any were."""
    line = f"{cut} of {rows} rows have more than {max_length} tokens and are cut; --max-seq-len sets another length"
    return [line] if cut else []


def _open(folder: Path, options: TextOptions) -> TextDatasets:
    """Open a cache entry that ``_build`` has filled."""
    entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    labels, pad = tuple(entry["labels"]), int(entry["tokens"]["pad"])
    left = pads_left(options)
    sources = {"evaluation": options.eval_data or options.data, "test": str(options.test_data), "train": options.data}
    said = {name: source_said(sources[name], embedded.EMBEDDED) for name in entry["facts"]}
    sets = {name: open_tokens(folder / name, pad, pad_left=left, source=source) for name, source in said.items()}
    classes = tuple(str(label) for label in labels)
    parts = entry["facts"].values()
    cut = _cut_warning(sum(part["rows_cut"] for part in parts), sum(map(len, sets.values())), options.max_seq_len)
    # The entry names the option and not the file: the next run's file may be another one, of the same content.
    warnings = [
        f"{source_name(getattr(options, source), embedded.EMBEDDED)}: {line}" for source, line in entry["warnings"]
    ]
    return TextDatasets(
        train=sets["train"],
        evaluation=sets["evaluation"],
        test=sets.get("test", sets["evaluation"]),
        facts={"data": options.data, "classes": list(classes), **entry["facts"]},
        warnings=(*warnings, *cut),
        classes=classes,
        labels=labels,
        tokenizer=folder / "tokenizer",
        **entry["tokens"],
    )
