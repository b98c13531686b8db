"""From a config to tokenised data sets: read, check, split, tokenise and cache by content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from distcore.config import RunConfig
from distcore.contract import Datasets
from distcore.data import embedded
from distcore.data.cache import cached_folder
from distcore.data.files import Rows, digest, read_rows
from distcore.data.split import class_names, encode_labels, split_rows
from distcore.data.tokens import TokenDataset, open_tokens, tokenize, write_tokens
from distcore.errors import DataError, ModelError, nearest
from distcore.models import TOKENIZERS, check_length, from_scratch, load_tokenizer, model_folder, read_config

FORMAT = 1
"""Grows whenever an entry of the cache changes its form or meaning."""


@dataclass(frozen=True, kw_only=True)
class TextDatasets(Datasets):
    """Labelled texts as tokens, and what belongs to them."""

    classes: tuple[str, ...]
    """Class names in the order of class numbers."""
    vocab_size: int
    pad_token: int
    tokenizer: Path
    """Folder that ``AutoTokenizer`` reads."""


def prepare_text(config: RunConfig) -> TextDatasets:
    """Return the data sets of a run, from the cache if any process has prepared the same before.

    A hit reads the files once, to name their content, and neither parses nor tokenises. Raises DataError,
    ModelError or ConfigError.
    """
    if not from_scratch(config):
        check_length(config, model_folder(config.model))
    folder = cached_folder("tokens", _key(config), lambda folder: _build(folder, config))
    return _open(folder, config)


def _key(config: RunConfig) -> str:
    """Name everything that the entry depends on."""
    facts = [
        FORMAT,
        [_source_digest(source) for source in (config.data, config.eval_data, config.test_data)],
        config.columns.model_dump(),
        None if config.eval_data else [config.seed, config.eval_fraction],
        config.max_seq_len,
        _tokenizer_digest(config),
        version("tokenizers"),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _source_digest(source: str | None) -> str | None:
    if source is None:
        return None
    return embedded.fingerprint(source) if source in embedded.EMBEDDED else digest(_file(source))


def _file(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.exists() and not path.suffix and path.name == source:
        known = ", ".join(embedded.EMBEDDED)
        hint = nearest(source, embedded.EMBEDDED)
        raise DataError(f"data {source!r}: neither a file nor an embedded data set{hint} (embedded: {known})")
    return path


def _tokenizer_digest(config: RunConfig) -> list[Any]:
    if from_scratch(config):
        return ["wordpiece", config.tokenizer.vocab_size]
    folder = model_folder(config.model)
    names = sorted({*TOKENIZERS, "config.json", *(path.name for path in folder.glob("*token*.json")), "merges.txt"})
    files = [folder / name for name in names]
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files if path.is_file()]


def _rows(source: str, config: RunConfig) -> Rows:
    reader = embedded.EMBEDDED.get(source)
    return reader() if reader else read_rows(_file(source), config.columns)


def _build(folder: Path, config: RunConfig) -> None:
    """Fill a new entry of the cache: one folder a data set, the tokenizer, and the facts of both."""
    rows = _rows(config.data, config)
    classes = class_names(rows)
    parts = _parts(rows, classes, config)
    train = parts["train"]
    tokenizer = _tokenizer(config, [train[0].texts[row] for row in train[2]])
    facts: dict[str, dict[str, object]] = {"rows": {}, "majority_share": {}, "rows_at_max_seq_len": {}}
    for part, (source, labels, chosen) in parts.items():
        tokens, lengths = tokenize(tokenizer, [source.texts[row] for row in chosen], config.max_seq_len)
        _check_vocabulary(config, tokens)
        write_tokens(folder / part, tokens, lengths, labels[chosen], chosen)
        facts["rows"][part] = len(chosen)
        facts["majority_share"][part] = round(float(np.bincount(labels[chosen]).max() / len(chosen)), 4)
        facts["rows_at_max_seq_len"][part] = int((lengths == config.max_seq_len).sum())
    tokenizer.save_pretrained(folder / "tokenizer")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    entry = {"classes": classes, "vocab_size": len(tokenizer), "pad_token": pad, "facts": facts}
    (folder / "entry.json").write_text(json.dumps(entry, ensure_ascii=False), encoding="utf-8")


def _parts(rows: Rows, classes: list[str], config: RunConfig) -> dict[str, tuple[Rows, np.ndarray, np.ndarray]]:
    """Return, by name of the data set, where its rows come from, their classes, and which of them it takes."""
    labels = encode_labels(rows, classes)
    if config.eval_data is None:
        train, kept = split_rows(rows.name, labels, config.eval_fraction, config.seed)
        parts = {"train": (rows, labels, train), "evaluation": (rows, labels, kept)}
    else:
        parts = {"train": (rows, labels, np.arange(len(rows)))}
        parts["evaluation"] = _whole(config.eval_data, classes, config)
    if config.test_data is not None:
        parts["test"] = _whole(config.test_data, classes, config)
    return parts


def _whole(source: str, classes: list[str], config: RunConfig) -> tuple[Rows, np.ndarray, np.ndarray]:
    rows = _rows(source, config)
    return rows, encode_labels(rows, classes), np.arange(len(rows))


def _tokenizer(config: RunConfig, texts: list[str]) -> Any:
    if not from_scratch(config):
        return load_tokenizer(config.model, model_folder(config.model))
    from distcore.data.vocabulary import as_transformers, train_wordpiece

    return as_transformers(train_wordpiece(texts, config.tokenizer.vocab_size))


def _check_vocabulary(config: RunConfig, tokens: np.ndarray) -> None:
    """A tokenizer that belongs to another model would index past the embedding."""
    if from_scratch(config):
        return
    size = read_config(config.model, model_folder(config.model)).get("vocab_size")
    if isinstance(size, int) and tokens.max(initial=0) >= size:
        problem = f"its tokenizer gives token {tokens.max()}, but config.json has a vocabulary of {size}"
        raise ModelError(f"model {config.model}: {problem}: tokenizer and weights do not belong together")


def _open(folder: Path, config: RunConfig) -> TextDatasets:
    entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    sets: dict[str, TokenDataset] = {
        part: open_tokens(folder / part, entry["pad_token"]) for part in entry["facts"]["rows"]
    }
    return TextDatasets(
        train=sets["train"],
        evaluation=sets["evaluation"],
        test=sets.get("test", sets["evaluation"]),
        facts={"data": config.data, "classes": entry["classes"], **entry["facts"]},
        classes=tuple(entry["classes"]),
        vocab_size=entry["vocab_size"],
        pad_token=entry["pad_token"],
        tokenizer=folder / "tokenizer",
    )
