"""Tokenized rows as one flat array on disk, memory-mapped: all ranks of a machine share one copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore.data import ArrayFile, array_blocks, map_array
from distcore_tasks.shared.jagged import Flat, FlatFile, open_flat
from distcore_tasks.text_classification.encode import Encoded

if TYPE_CHECKING:
    from torch import Tensor

CONTENT = "content.sha256"
"""File with the digest of a data set's rows."""
IDS = "ids.json"
"""File with the ids of a data set's rows, if they have any."""
TYPES = "types.npy"
"""File with the types of its tokens, if they have any."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenDataset:
    """Tokenized rows, each with its label; implements ``distcore.Dataset``."""

    tokens: np.ndarray
    """All rows one after the other, int32, shape ``(sum of lengths,)``."""
    starts: np.ndarray
    """Index in ``tokens`` at which each row starts, int64, shape ``(rows,)``."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    labels: np.ndarray
    """What the model is to say of each row, as the ``Problem`` at hand encodes it, shape ``(rows, …)``."""
    source_rows: np.ndarray
    """Number of each row in the file that it came from, counted from 0, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Ones: each row is one sample of the mean loss."""
    pad: int
    """Token that fills up the shorter rows of a batch."""
    pad_left: bool
    """Whether it stands before the tokens of a row; otherwise behind them."""
    content: str
    """SHA-256 over tokens, lengths, labels and types, in hexadecimal."""
    source: str
    """The file that the rows came from, as the user named it, or the name of an embedded data set."""
    ids: Path | None = None
    """The file with their ids, if they have any."""
    types: np.ndarray | None = None
    """Which text of a pair each token belongs to, int8, of the shape of ``tokens``; ``None`` if nothing says it."""
    type_pad: int = 0
    """What it is of padding."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as tensors on the CPU, padded to the longest of them.

        ``input_ids``, ``attention_mask`` and, if the data set has types, ``token_type_ids`` are int64 ``(n, longest)``,
        ``labels`` ``(n, …)``.
        """
        import torch

        starts, lengths = self.starts[indices], self.lengths[indices]
        columns = model_inputs(self.tokens, self.pad, self.types, self.type_pad)
        padded = pad_rows(columns, starts, lengths, pad_left=self.pad_left)
        return padded | {"labels": torch.from_numpy(self.labels[indices])}

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield for each row where it came from: ``file``, ``row`` (counted from 1) and, if it has one, ``id``."""
        ids = json.loads(self.ids.read_text(encoding="utf-8")) if self.ids else repeat(None)
        for row, name in zip(self.source_rows.tolist(), ids, strict=False):
            yield {"file": self.source, "row": row + 1} | ({"id": name} if self.ids else {})


def model_inputs(
    tokens: np.ndarray, pad: int, types: np.ndarray | None, type_pad: int
) -> dict[str, tuple[np.ndarray, int]]:
    """Return tokens and types, each with what pads it, under the names that models of transformers give them."""
    return {"input_ids": (tokens, pad)} | ({} if types is None else {"token_type_ids": (types, type_pad)})


def pad_rows(
    columns: Mapping[str, tuple[np.ndarray, int]], starts: np.ndarray, lengths: np.ndarray, *, pad_left: bool
) -> dict[str, Tensor]:
    """Return each of ``columns`` and ``attention_mask`` for some rows, int64 ``(rows, longest)``, on the CPU.

    Of a column, ``(all,)``, a row has as many values as ``lengths`` says, from its entry of ``starts`` on, both int64
    ``(rows,)``. Beside the column stands what pads it.
    """
    import torch

    longest = lengths.max(initial=0)
    places = np.arange(longest) - ((longest - lengths)[:, None] if pad_left else 0)
    mask = (places >= 0) & (places < lengths[:, None])
    # Beside a shorter row this reads values of its neighbours; the mask then replaces them by padding.
    padded = {
        name: torch.from_numpy(np.where(mask, values.take(starts[:, None] + places, mode="clip"), np.int64(pad)))
        for name, (values, pad) in columns.items()
    }
    return padded | {"attention_mask": torch.from_numpy(mask.astype(np.int64))}


def write_tokens(
    folder: Path,
    encoded: Iterable[Encoded],
    labels: np.ndarray,
    source_rows: np.ndarray,
    ids: Sequence[int | str] | None = None,
) -> tuple[np.ndarray, int]:
    """Write the arrays of one data set, their digest and the rows' ids into the new folder ``folder``.

    ``encoded`` has the tokens of some rows at a time. Returns the tokens of each row, int64 ``(rows,)``, and how many
    rows were longer.
    """
    folder.mkdir()
    cut = 0
    with FlatFile(folder, "tokens", np.int32) as tokens, ArrayFile(folder / TYPES, np.int8) as types:
        for some in encoded:
            tokens.add(Flat(some.tokens, np.cumsum([0, *some.lengths], dtype=np.int64)))
            if some.types is not None:
                types.add(some.types)
            cut += some.cut
    typed = [map_array(folder / TYPES)] if types.count else []
    if not typed:
        (folder / TYPES).unlink()
    written = open_flat(folder, "tokens")
    np.save(folder / "labels.npy", labels)
    np.save(folder / "source_rows.npy", source_rows)
    content = _digest(written.values, written.lengths, labels, *typed)
    (folder / CONTENT).write_text(content, encoding="ascii")
    if ids is not None:
        (folder / IDS).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    return written.lengths, cut


def open_tokens(folder: Path, pad: int, *, pad_left: bool = False, type_pad: int = 0, source: str = "") -> TokenDataset:
    """Map the arrays that ``write_tokens`` wrote into memory; ``pad`` is the padding token, ``pad_left`` its side.

    ``type_pad`` is its type, ``source`` the file or embedded data set that the rows came from.
    """
    tokens = open_flat(folder, "tokens")
    lengths = tokens.lengths
    return TokenDataset(
        tokens=tokens.values,
        starts=tokens.offsets[:-1],
        lengths=lengths,
        labels=map_array(folder / "labels.npy"),
        source_rows=map_array(folder / "source_rows.npy"),
        items=np.ones(len(lengths), np.int64),
        pad=pad,
        pad_left=pad_left,
        content=(folder / CONTENT).read_text(encoding="ascii"),
        source=source,
        ids=folder / IDS if (folder / IDS).exists() else None,
        types=map_array(folder / TYPES) if (folder / TYPES).exists() else None,
        type_pad=type_pad,
    )


def empty_dataset(pad: int) -> TokenDataset:
    """Return a data set without rows; ``pad`` is the padding token."""
    tokens, none = np.empty(0, np.int32), np.empty(0, np.int64)
    return TokenDataset(
        tokens=tokens,
        starts=none,
        lengths=none,
        labels=none,
        source_rows=none,
        items=none,
        pad=pad,
        pad_left=False,
        content="",
        source="",
    )


def _digest(*columns: np.ndarray) -> str:
    digest = hashlib.sha256()
    for column in columns:
        kind = "<f4" if column.dtype.kind == "f" else "<i8"  # the same bytes on every machine
        for block in array_blocks(column):
            digest.update(np.ascontiguousarray(block, dtype=kind).data)
    return digest.hexdigest()
