"""Rows of texts as flat token arrays, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from distcore_data import RowOrder
from distcore_tasks.shared.jagged import (
    Flat,
    FlatFile,
    flat_digest,
    flat_rows,
    open_flat,
    read_content,
    write_content,
)

HALF = 24
"""Bits of a half of a text's digest: fp32, in which rows are gathered, holds them exactly."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TextsDataset:
    """Rows of one or several texts each; implements ``distcore.Dataset``."""

    texts: dict[str, Flat]
    """Tokens of ``anchor``, ``positive`` and, if rows have one, ``negative``;
    or of ``text``, to embed.
    """
    pad: int
    """Padding token."""
    content: str
    """SHA-256 over all tokens, in hexadecimal."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    @property
    def pads(self) -> bool:
        """True: each text is padded to the longest."""
        return True

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all texts of each row, int64, shape ``(rows,)``."""
        lengths: np.ndarray = np.sum([text.lengths for text in self.texts.values()], axis=0)
        return lengths

    @property
    def items(self) -> np.ndarray:
        """Ones: the mean loss is over rows."""
        return np.ones(len(self), np.int64)

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())).offsets) - 1

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        """Return the rows ``indices``, int64 ``(n,)``: for each text of a row its name
        with the model's inputs.

        ``input_ids`` and ``attention_mask`` are int64 ``(n, longest)``. ``same`` has a digest of
        the tokens of each text in two halves, int64 ``(n, texts of a row, 2)``.
        """
        import torch

        batch: dict[str, Any] = {}
        for name, text in self.texts.items():
            tables = zip(
                ("input_ids", "attention_mask"), text.padded(indices, self.pad), strict=True
            )
            batch[name] = {key: torch.from_numpy(table.astype(np.int64)) for key, table in tables}
        same = [[_halves(text.row(index)) for text in self.texts.values()] for index in indices]
        return batch | {
            "same": torch.from_numpy(np.array(same, np.int64).reshape(len(indices), -1, 2))
        }


def write_texts(
    folder: Path, names: Iterable[str], encoded: Iterable[tuple[list[Flat], int]]
) -> int:
    """Write the tokens of a dataset, and their digest, to the new ``folder``; return the
    number of texts cut.
    """
    folder.mkdir()
    cut, names = 0, tuple(names)
    with ExitStack() as stack:
        files = [stack.enter_context(FlatFile(folder, name, np.int32)) for name in names]
        for columns, cut_here in encoded:
            cut += cut_here
            for file, column in zip(files, columns, strict=True):
                file.add(column)
    write_content(folder, flat_digest(*(open_flat(folder, name) for name in names)))
    return cut


def open_texts(folder: Path, names: Iterable[str], pad: int) -> TextsDataset:
    """Map the files of ``write_texts`` into memory."""
    return TextsDataset(
        texts={name: open_flat(folder, name) for name in names},
        pad=pad,
        content=read_content(folder),
    )


def empty_dataset(pad: int) -> TextsDataset:
    """Return a dataset without rows."""
    return TextsDataset(texts={"text": flat_rows([])}, pad=pad, content="")


def _halves(tokens: np.ndarray) -> tuple[int, int]:
    digest = blake2b(tokens.astype("<i4").tobytes(), digest_size=2 * HALF // 8).digest()
    return int.from_bytes(digest[: HALF // 8], "big"), int.from_bytes(digest[HALF // 8 :], "big")
