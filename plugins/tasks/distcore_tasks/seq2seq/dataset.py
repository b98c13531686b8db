"""Pairs as flat token arrays, memory-mapped, with texts for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_data import RowOrder
from distcore_tasks.shared.jagged import (
    IGNORED,
    Flat,
    FlatFile,
    flat_digest,
    open_flat,
    read_content,
    write_content,
)

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("source", "target")
"""Parts of a pair."""


def flat_texts(texts: Sequence[str]) -> Flat:
    """Return the texts as UTF-8 bytes."""
    parts = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Flat(np.frombuffer(b"".join(parts), np.uint8), offsets)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PairDataset:
    """Sources and targets; implements ``distcore.Dataset``."""

    source: Flat
    """Tokens of the sources."""
    target: Flat
    """Tokens of the targets."""
    texts: dict[str, Flat]
    """``source`` and ``target`` as text, for evaluation; empty for training rows."""
    pad: int
    """Padding token of sources."""
    lengths: np.ndarray
    """Tokens of each row, source and target together, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Tokens of each target, int64, shape ``(rows,)``: the weight of the row in the mean loss."""
    content: str
    """SHA-256 over the tokens of both, in hexadecimal."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as tensors on the CPU, padded to
        the longest of them.

        ``input_ids`` and ``attention_mask`` are int64 ``(n, longest source)``. ``labels`` are int64
        ``(n, longest target)``, ``IGNORED`` after a target. For each text, ``NAME_text`` has the
        bytes of all rows, concatenated, uint8, and ``NAME_bytes`` the number of bytes of each row,
        int64 ``(n,)``.
        """
        import torch

        source, mask = self.source.padded(indices, self.pad)
        labels, _ = self.target.padded(indices, IGNORED)
        tables = {"input_ids": source, "attention_mask": mask, "labels": labels}
        batch = {name: torch.from_numpy(table.astype(np.int64)) for name, table in tables.items()}
        for name, texts in self.texts.items():
            text, mask = texts.padded(indices, 0)
            batch |= {
                f"{name}_text": torch.from_numpy(text[mask]),
                f"{name}_bytes": torch.from_numpy(mask.sum(1)),
            }
        return batch


class PairFiles:
    """The files of one dataset, in the new folder ``folder``; a context
    manager that closes them.
    """

    def __init__(self, folder: Path) -> None:
        """Create the files."""
        folder.mkdir()
        self._tokens = {name: FlatFile(folder, name, np.int32) for name in NAMES}
        self._texts = {name: FlatFile(folder, f"{name}_text", np.uint8) for name in NAMES}

    def __enter__(self) -> PairFiles:
        """Return the files."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the files."""
        for file in (*self._tokens.values(), *self._texts.values()):
            file.__exit__(*error)

    def add(self, source: Flat, target: Flat, texts: Sequence[tuple[str, ...]]) -> None:
        """Append rows: the tokens of sources and targets, and their texts."""
        for name, tokens, column in zip(
            NAMES, (source, target), zip(*texts, strict=True), strict=True
        ):
            self._tokens[name].add(tokens)
            self._texts[name].add(flat_texts(column))


def finish_pairs(folder: Path) -> tuple[Flat, Flat]:
    """Write the digest of a dataset's tokens. Return sources and targets, memory-mapped."""
    source, target = (open_flat(folder, name) for name in NAMES)
    write_content(folder, flat_digest(source, target))
    return source, target


def open_pairs(folder: Path, pad: int, *, texts: bool) -> PairDataset:
    """Map the files of ``PairFiles`` and ``finish_pairs`` into memory; with
    their texts if ``texts``.
    """
    shown = {name: open_flat(folder, f"{name}_text") for name in NAMES if texts}
    return pair_dataset(
        open_flat(folder, "source"), open_flat(folder, "target"), shown, pad, read_content(folder)
    )


def empty_dataset(pad: int) -> PairDataset:
    """Return a dataset without rows."""
    none = Flat(np.empty(0, np.int32), np.zeros(1, np.int64))
    return pair_dataset(none, none, {}, pad, "")


def pair_dataset(
    source: Flat, target: Flat, texts: dict[str, Flat], pad: int, content: str
) -> PairDataset:
    """Return pairs of these tokens."""
    items = np.diff(target.offsets)
    lengths = items + np.diff(source.offsets)
    return PairDataset(
        source=source,
        target=target,
        texts=texts,
        pad=pad,
        lengths=lengths,
        items=items,
        content=content,
    )
