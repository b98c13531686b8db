"""Tokens of all rows and the words that begin at them, as flat arrays on disk; rows of a file without tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from distcore.data.files import row_error
from distcore.errors import ModelError
from distcore.plugin.columns import ConstantColumn
from distcore.plugin.task import FileRows
from distcore.tasks.flat import IGNORED, Flat, flat_digest, flat_rows, open_flat, write_flat
from distcore.tasks.pretrained import load_tokenizer
from distcore.tasks.token_classification.rows import words_problem
from distcore.tasks.tokenizing import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

CONTENT = "content.sha256"
"""File with the digest of a data set's rows."""
ROWS = "rows.json"
"""File with the number of each row in the file that it came from, from 1, and its id, if rows have one."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Words:
    """Tokenised words of some rows."""

    tokens: Flat
    """Tokens of each row."""
    begins: Flat
    """For each token the word, counted from 0, that begins with it; ``IGNORED`` for the others."""
    count: np.ndarray
    """Words of each row, those without a token too, int64, shape ``(rows,)``."""

    def judged(self) -> np.ndarray:
        """Return how many words of each row have a token, int64, shape ``(rows,)``."""
        total = np.concatenate([[0], np.cumsum(self.begins.values >= 0, dtype=np.int64)])
        found: np.ndarray = np.diff(total[self.begins.offsets])
        return found

    def batch(self, rows: np.ndarray, pad: int) -> dict[str, Tensor]:
        """Return int64 ``input_ids``, ``attention_mask``, ``begins``, ``(n, longest)``, and ``words``, ``(n,)``."""
        import torch

        tokens, mask = self.tokens.padded(rows, pad)
        begins, _ = self.begins.padded(rows, IGNORED)
        found = {"input_ids": tokens, "attention_mask": mask, "begins": begins, "words": self.count[rows]}
        return {name: torch.from_numpy(array.astype(np.int64)) for name, array in found.items()}


def words_tokenizer(name: str, folder: Path) -> Any:
    """Load a tokenizer that tells where words begin; raises ModelError, one line, for one that does not."""
    tokenizer = load_tokenizer(name, folder)
    if not tokenizer.is_fast:
        raise ModelError(f"model {name}: token classification needs a fast tokenizer, which knows where words begin")
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(splitter, ByteLevel) and not splitter.add_prefix_space:  # as of GPT-2: "a" and " a" are unlike tokens
        tokenizer = load_tokenizer(name, folder, add_prefix_space=True)
        tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)  # not every class has done it
    return tokenizer


def tokenize_words(tokenizer: Any, rows: Sequence[list[str]], max_length: int) -> Words:
    """Tokenise rows of words, each row cut to ``max_length`` tokens."""
    tokens, begins = [], []
    for start in range(0, len(rows), CHUNK):
        some = [list(row) for row in rows[start : start + CHUNK]]
        found = tokenizer(some, is_split_into_words=True, truncation=True, max_length=max_length)
        tokens += [np.asarray(row, np.int32) for row in found["input_ids"]]
        begins += [_begins(found.word_ids(number)) for number in range(len(some))]
    count = np.fromiter(map(len, rows), np.int64, len(rows))
    return Words(tokens=flat_rows(tokens), begins=flat_rows(begins), count=count)


def _begins(words: list[int | None]) -> np.ndarray:
    """Return for each token the word that begins with it: the one that it belongs to, if the token before does not."""
    found = np.asarray([IGNORED if word is None else word for word in words], np.int32)
    found[1:][found[1:] == found[:-1]] = IGNORED
    return found


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TaggedDataset:
    """Tagged words; implements ``Dataset`` and ``Identified`` of ``distcore.plugin.task``."""

    words: Words
    """Tokens and where words begin."""
    labels: Flat
    """For each token the class of the word that begins with it; ``IGNORED`` for the others."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Words of each row that have a token, int64, shape ``(rows,)``: what a row counts in the mean loss."""
    pad: int
    """Token that fills up the shorter rows of a batch."""
    content: str
    """SHA-256 over tokens and classes, in hexadecimal."""
    source: str = ""
    """The file that the rows came from, as the user named it, or the name of an embedded data set."""
    origin: Path | None = None
    """``ROWS`` of these."""

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU, padded to the longest of them.

        ``input_ids``, ``attention_mask``, ``begins`` and ``labels`` are ``(n, longest)``, ``words`` is ``(n,)``.
        """
        import torch

        labels, _ = self.labels.padded(indices, IGNORED)
        return self.words.batch(indices, self.pad) | {"labels": torch.from_numpy(labels.astype(np.int64))}

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield for each row where it came from: ``file``, ``row`` (counted from 1) and, if it has one, ``id``."""
        rows, ids = json.loads(self.origin.read_text(encoding="utf-8")) if self.origin else ([], None)
        for row, name in zip(rows, ids or repeat(None), strict=False):
            yield {"file": self.source, "row": row} | ({"id": name} if ids else {})


def write_tagged(folder: Path, words: Words, tags: Sequence[list[int]], origin: tuple[list[int], Any]) -> None:
    """Write one data set, and the digest of its rows, into the new folder ``folder``.

    ``tags`` are the classes of all words, ``origin`` the numbers of the rows, from 1, and their ids or ``None``.
    """
    folder.mkdir()
    every, starts = np.concatenate([np.asarray(row, np.int32) for row in tags]), np.cumsum(words.count) - words.count
    word = words.begins.values + np.repeat(starts, words.begins.lengths)
    labels = np.where(words.begins.values >= 0, every[np.maximum(word, 0)], np.int32(IGNORED))
    columns = {"tokens": words.tokens, "begins": words.begins, "labels": Flat(labels, words.begins.offsets)}
    for name, flat in columns.items():
        write_flat(folder, name, flat)
    np.save(folder / "count.npy", words.count)
    (folder / CONTENT).write_text(flat_digest(*columns.values()), encoding="ascii")
    (folder / ROWS).write_text(json.dumps(origin, ensure_ascii=False), encoding="utf-8")


def open_tagged(folder: Path, pad: int, source: str) -> TaggedDataset:
    """Map what ``write_tagged`` wrote into memory; ``source`` is what predictions call the file of the rows."""
    tokens, begins, labels = (open_flat(folder, name) for name in ("tokens", "begins", "labels"))
    words = Words(tokens=tokens, begins=begins, count=np.load(folder / "count.npy", allow_pickle=False))
    content = (folder / CONTENT).read_text(encoding="ascii")
    return _dataset(words, labels, pad, content, source=source, origin=folder / ROWS)


def no_tagged(pad: int) -> TaggedDataset:
    """Return a data set without rows."""
    none = flat_rows([])
    return _dataset(Words(tokens=none, begins=none, count=np.empty(0, np.int64)), none, pad, "")


def _dataset(words: Words, labels: Flat, pad: int, content: str, **origin: Any) -> TaggedDataset:
    lengths, items = words.tokens.lengths, words.judged()
    return TaggedDataset(words=words, labels=labels, lengths=lengths, items=items, pad=pad, content=content, **origin)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class UntaggedWords:
    """Words of a file, a window of it at a time; a rank tokenises those that it predicts, when it does."""

    rows: FileRows
    """Words of each row."""
    tokenizer: Any
    """Of the model."""
    max_seq_len: int
    """Tokens of a row."""
    pad: int
    """Token that fills up the shorter rows of a batch."""
    lengths: np.ndarray
    """Words of each row: enough to put rows of like length together, and known without tokenising."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices`` as ``TaggedDataset.batch`` does, without labels."""
        records: Any = [self.rows.records[index] for index in indices]
        words = tokenize_words(self.tokenizer, [row for (row,) in records], self.max_seq_len)
        return words.batch(np.arange(len(indices)), self.pad)


def untagged_words(rows: FileRows, tokenizer: Any, max_seq_len: int, pad: int) -> UntaggedWords:
    """Return the words of ``rows``; raises DataError, which names file and row, for one that cannot be used."""
    for number, (words,) in enumerate(rows.records, rows.start):
        if problem := words_problem(words):
            raise row_error(f"data file {rows.file}", number, problem)
    records: Any = rows.records
    lengths = np.fromiter((len(words) for (words,) in records), np.int64, len(records))
    items = ConstantColumn(len(lengths), 1)
    return UntaggedWords(rows=rows, tokenizer=tokenizer, max_seq_len=max_seq_len, pad=pad, lengths=lengths, items=items)
