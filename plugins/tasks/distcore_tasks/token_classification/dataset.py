"""Tagged words in memory-mapped files, which all ranks of a machine share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_data import RowOrder
from distcore_tasks.shared.arrays import ArrayFile
from distcore_tasks.shared.jagged import (
    IGNORED,
    Flat,
    FlatFile,
    flat_digest,
    flat_rows,
    open_flat,
    read_content,
    write_content,
)
from distcore_tasks.token_classification.encode import Words

if TYPE_CHECKING:
    from torch import Tensor

FLATS = ("tokens", "begins", "labels")
"""Arrays of each row: tokens, starts of words, and classes."""
ROWS = "rows.json"
"""File with the number of each row in its source file, from 1, and its id, if any."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TaggedDataset:
    """Tagged words; implements ``distcore.Dataset``."""

    words: Words
    """Tokens and starts of words."""
    labels: Flat
    """For the first token of each word its class; ``IGNORED`` for other tokens."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Words of each row with a token, int64, shape ``(rows,)``: the weight of the row
    in the mean loss.
    """
    pad: int
    """Padding token."""
    content: str
    """SHA-256 over tokens and classes, in hexadecimal."""
    source: str = ""
    """The source file, as the user named it, or the name of an embedded dataset."""
    origin: Path | None = None
    """The file ``ROWS`` of these rows."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU, padded to
        the longest of them.

        ``input_ids``, ``attention_mask``, ``begins`` and ``labels`` are ``(n,
        longest)``, ``words`` is ``(n,)``.
        """
        import torch

        labels, _ = self.labels.padded(indices, IGNORED)
        return self.words.batch(indices, self.pad) | {
            "labels": torch.from_numpy(labels.astype(np.int64))
        }

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each row: ``file``, ``row`` (counted from 1) and ``id``, if any."""
        rows, ids = (
            json.loads(self.origin.read_text(encoding="utf-8")) if self.origin else ([], None)
        )
        for row, name in zip(rows, ids or repeat(None), strict=False):
            yield {"file": self.source, "row": row} | ({"id": name} if ids else {})


class TaggedFiles:
    """The files of one dataset, in the new folder ``folder``; a context
    manager that closes them.
    """

    def __init__(self, folder: Path) -> None:
        """Create the files."""
        folder.mkdir()
        self._flats = {name: FlatFile(folder, name, np.int32) for name in FLATS}
        self._count = ArrayFile(folder / "count.npy", np.int64)

    def __enter__(self) -> TaggedFiles:
        """Return the files."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files."""
        self._count.__exit__(*error)
        for file in self._flats.values():
            file.__exit__(*error)

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return self._count.count

    def add(self, words: Words, tags: Sequence[list[int]]) -> None:
        """Append rows. ``tags``: the classes of all their words."""
        flats = (words.tokens, words.begins, token_labels(words, tags))
        for name, flat in zip(FLATS, flats, strict=True):
            self._flats[name].add(flat)
        self._count.add(words.count)


def token_labels(words: Words, tags: Sequence[list[int]]) -> Flat:
    """Return the class of each first token of a word, ``IGNORED`` for others. ``tags``: the
    classes of all words.
    """
    every = np.concatenate([np.asarray(row, np.int32) for row in tags])
    starts = np.cumsum(words.count) - words.count
    word = words.begins.values + np.repeat(starts, words.begins.lengths)
    labels = np.where(words.begins.values >= 0, every[np.maximum(word, 0)], np.int32(IGNORED))
    return Flat(labels, words.begins.offsets)


def finish_tagged(folder: Path, numbers: Sequence[int], ids: Sequence[int | str] | None) -> None:
    """Write the digest of a dataset's rows, and their origins: numbers, from 1, and ids."""
    write_content(folder, flat_digest(*(open_flat(folder, name) for name in FLATS)))
    (folder / ROWS).write_text(json.dumps((numbers, ids), ensure_ascii=False), encoding="utf-8")


def open_tagged(folder: Path, pad: int, source: str) -> TaggedDataset:
    """Map the files of ``TaggedFiles`` and ``finish_tagged`` into memory. ``source``:
    the source file's name.
    """
    tokens, begins, labels = (open_flat(folder, name) for name in FLATS)
    words = Words(
        tokens=tokens, begins=begins, count=np.load(folder / "count.npy", allow_pickle=False)
    )
    return tagged_dataset(
        words, labels, pad, read_content(folder), source=source, origin=folder / ROWS
    )


def empty_dataset(pad: int) -> TaggedDataset:
    """Return a dataset without rows."""
    none = flat_rows([])
    return tagged_dataset(
        Words(tokens=none, begins=none, count=np.empty(0, np.int64)), none, pad, ""
    )


def tagged_dataset(
    words: Words, labels: Flat, pad: int, content: str, **origin: Any
) -> TaggedDataset:
    """Return tagged words."""
    lengths, items = words.tokens.lengths, words.count_judged()
    return TaggedDataset(
        words=words, labels=labels, lengths=lengths, items=items, pad=pad, content=content, **origin
    )
