"""Tokenized texts with labels, in memory-mapped files, which all ranks of a machine share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore_data import RowOrder
from distcore_tasks.shared.arrays import ArrayFile, digest_arrays, map_array
from distcore_tasks.shared.jagged import (
    Flat,
    FlatFile,
    flat_rows,
    open_flat,
    read_content,
    write_content,
)
from distcore_tasks.text_classification.encode import Encoded

if TYPE_CHECKING:
    from torch import Tensor

IDS = "ids.json"
"""File with the ids of a dataset's rows, if they have any."""
TYPES = "types.npy"
"""File with the token types of a dataset, if it has any."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenDataset:
    """Tokenized rows, each with its label; implements ``distcore.Dataset``."""

    tokens: Flat
    """Tokens of all rows, int32."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    labels: np.ndarray
    """Label of each row, encoded by the task's ``Problem``, shape ``(rows, …)``."""
    source_rows: np.ndarray
    """Number of each row in its source file, counted from 0, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Ones, because each row is one item of the mean loss."""
    pad: int
    """Padding token."""
    pad_left: bool
    """True if padding comes before the tokens of a row; otherwise it comes after."""
    content: str
    """SHA-256 over tokens, lengths, labels and types, in hexadecimal."""
    source: str
    """The source file, as the user named it, or the name of an embedded dataset."""
    ids: Path | None = None
    """File with the rows' ids, if they have any."""
    types: Flat | None = None
    """Token types, int8; ``None`` if the model takes none."""
    type_pad: int = 0
    """Token type of padding."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as tensors on the CPU, padded
        to the longest row.

        ``input_ids``, ``attention_mask`` and, if the dataset has types, ``token_type_ids`` are
        int64 ``(n, longest)``, ``labels`` ``(n, …)``.
        """
        import torch

        inputs = model_inputs(
            indices,
            self.tokens,
            self.types,
            pad=self.pad,
            type_pad=self.type_pad,
            left=self.pad_left,
        )
        return inputs | {"labels": torch.from_numpy(self.labels[indices])}

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each row: ``file``, ``row`` (counted from 1) and ``id``, if any."""
        ids = json.loads(self.ids.read_text(encoding="utf-8")) if self.ids else repeat(None)
        for row, name in zip(self.source_rows.tolist(), ids, strict=False):
            yield {"file": self.source, "row": row + 1} | ({"id": name} if self.ids else {})


def model_inputs(
    rows: np.ndarray, tokens: Flat, types: Flat | None, *, pad: int, type_pad: int, left: bool
) -> dict[str, Tensor]:
    """Return the rows with the numbers ``rows``, int64 ``(n,)``, by transformers'
    names of model inputs.

    ``input_ids``, ``attention_mask`` and, with ``types``, ``token_type_ids`` are int64 ``(n,
    longest)`` on the CPU.
    """
    import torch

    padded, mask = tokens.padded(rows, pad, left=left)
    tables = {"input_ids": padded, "attention_mask": mask}
    if types is not None:
        tables["token_type_ids"], _ = types.padded(rows, type_pad, left=left)
    return {name: torch.from_numpy(table.astype(np.int64)) for name, table in tables.items()}


def write_tokens(
    folder: Path,
    encoded: Iterable[Encoded],
    labels: np.ndarray,
    source_rows: np.ndarray,
    ids: Sequence[int | str] | None = None,
) -> tuple[np.ndarray, int]:
    """Write the arrays of one dataset, their digest and the rows' ids to the new folder ``folder``.

    ``encoded`` yields tokens in chunks of rows. Returns the length of each row, int64 ``(rows,)``,
    and the number of rows cut.
    """
    folder.mkdir()
    cut = 0
    with (
        FlatFile(folder, "tokens", np.int32) as tokens,
        ArrayFile(folder / TYPES, np.int8) as types,
    ):
        for chunk in encoded:
            tokens.add(chunk.tokens)
            if chunk.types is not None:
                types.add(chunk.types.values)
            cut += chunk.cut
    typed = [map_array(folder / TYPES)] if types.count else []
    if not typed:
        (folder / TYPES).unlink()
    written = open_flat(folder, "tokens")
    np.save(folder / "labels.npy", labels)
    np.save(folder / "source_rows.npy", source_rows)
    write_content(
        folder, digest_arrays(written.values, written.lengths, labels, *typed, widen=True)
    )
    if ids is not None:
        (folder / IDS).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    return written.lengths, cut


def open_tokens(
    folder: Path, pad: int, *, pad_left: bool = False, type_pad: int = 0, source: str = ""
) -> TokenDataset:
    """Map the arrays of ``write_tokens`` into memory.

    Padding has the token ``pad`` and the token type ``type_pad``, and comes first if ``pad_left``.
    ``source`` names the file or embedded dataset of the rows.
    """
    tokens = open_flat(folder, "tokens")
    lengths = tokens.lengths
    return TokenDataset(
        tokens=tokens,
        lengths=lengths,
        labels=map_array(folder / "labels.npy"),
        source_rows=map_array(folder / "source_rows.npy"),
        items=np.ones(len(lengths), np.int64),
        pad=pad,
        pad_left=pad_left,
        content=read_content(folder),
        source=source,
        ids=folder / IDS if (folder / IDS).exists() else None,
        types=(
            Flat(map_array(folder / TYPES), tokens.offsets) if (folder / TYPES).exists() else None
        ),
        type_pad=type_pad,
    )


def empty_dataset(pad: int) -> TokenDataset:
    """Return a dataset without rows; ``pad`` is the padding token."""
    none = np.empty(0, np.int64)
    return TokenDataset(
        tokens=flat_rows([]),
        lengths=none,
        labels=none,
        source_rows=none,
        items=none,
        pad=pad,
        pad_left=False,
        content="",
        source="",
    )
