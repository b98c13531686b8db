"""Rows of tokens with masked positions. The positions depend on seed, epoch and row only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore import row_random
from distcore_data import RowOrder
from distcore_tasks.shared.arrays import ArrayFile
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

HIDDEN, REPLACED = 0.8, 0.1
"""Fractions of the selected tokens that become the mask token, or a random
token. The others stay.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """Settings of the masking."""

    probability: float
    """Fraction of the ordinary tokens of a row to predict."""
    mask: int
    """The mask token."""
    ordinary: np.ndarray
    """Tokens of the vocabulary that are not special, int64, ascending. Only these are
    masked, or replace others.
    """
    size: int
    """Largest token number plus 1."""
    seed: int
    """Seed of the random masks."""

    def items(self, ordinary: np.ndarray) -> np.ndarray:
        """Return the number of masked tokens of each row, int64 ``(rows,)``. It is the
        same in every epoch.

        ``ordinary``: number of ordinary tokens of each row, int64 ``(rows,)``.
        """
        wanted = np.rint(self.probability * ordinary).astype(np.int64)
        counts: np.ndarray = np.minimum(np.maximum(wanted, 1), ordinary)
        return counts

    def masked(
        self, tokens: np.ndarray, count: int, epoch: int, row: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the masked copy of a row, and the positions of its ``count`` tokens to predict.

        ``tokens``: those of the row, ``(tokens,)``. The same epoch and row give the same result.
        """
        random = row_random(self.seed, epoch, row)
        places = random.choice(
            np.flatnonzero(self._is_ordinary[tokens]), count, replace=False, shuffle=False
        )
        drawn, others = random.random(count), random.choice(self.ordinary, count)
        put = np.where(
            drawn < HIDDEN, self.mask, np.where(drawn < HIDDEN + REPLACED, others, tokens[places])
        )
        read = tokens.copy()
        read[places] = put
        return read, places

    def count(self, tokens: np.ndarray) -> int:
        """Return the number of masked tokens of a row with these tokens."""
        return int(self.items(np.count_nonzero(self._is_ordinary[tokens], keepdims=True))[0])

    @cached_property
    def _is_ordinary(self) -> np.ndarray:
        """True for ordinary tokens, by token number; bool ``(size,)``."""
        table = np.zeros(self.size, bool)
        table[self.ordinary] = True
        return table


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MaskedDataset:
    """Rows with the masks of one epoch; implements ``distcore.Dataset``."""

    tokens: Flat
    """Tokens of all rows."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Masked tokens of each row, int64, shape ``(rows,)``: the weight of the
    row in the mean loss.
    """
    masking: Masking
    """Settings of the masking."""
    pad: int
    """Padding token."""
    content: str
    """SHA-256 over the tokens, in hexadecimal."""
    epoch: int = 0
    """Epoch of the masks; always 0 for evaluation."""
    tells_targets: bool = False
    """True if batches contain the positions of their targets."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    def __len__(self) -> int:
        return len(self.items)

    def with_targets(self) -> MaskedDataset:
        """Return the same rows, with target positions in the batches."""
        return replace(self, tells_targets=True)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU, padded to
        the longest of them.

        ``input_ids``, ``attention_mask`` and ``labels`` are ``(n, longest)``. Labels are
        ``IGNORED`` except for masked tokens. With ``tells_targets``, ``targets``, ``(targets,)``,
        has the positions of masked tokens among the tokens of all rows, without padding.
        """
        batch = masked_batch(
            self.tokens, indices, self.items[indices], self.masking, self.epoch, indices, self.pad
        )
        return with_positions(batch) if self.tells_targets else batch


def masked_batch(
    flat: Flat,
    rows: np.ndarray,
    items: np.ndarray,
    masking: Masking,
    epoch: int,
    numbers: np.ndarray,
    pad: int,
) -> dict[str, Tensor]:
    """Return the rows ``rows`` of ``flat`` as a batch. ``numbers``: those by which
    their masks are drawn.
    """
    import torch

    tokens, mask = flat.padded(rows, pad)
    labels = np.full_like(tokens, IGNORED)
    for place, (row, count, number) in enumerate(
        zip(rows.tolist(), items.tolist(), numbers.tolist(), strict=True)
    ):
        whole = flat.row(row)
        read, places = masking.masked(whole, count, epoch, number)
        tokens[place, : len(whole)] = read
        labels[place, places] = whole[places]
    arrays = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


def with_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with ``targets``, the positions of masked tokens among the
    tokens of all rows.
    """
    targets = (batch["labels"][batch["attention_mask"].bool()] != IGNORED).nonzero()[:, 0]
    return batch | {"targets": targets}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class VaryingMasks(MaskedDataset):
    """Training rows, with new masks in each epoch."""

    def at(self, epoch: int) -> MaskedDataset:
        """Return the rows with the masks of ``epoch``."""
        return MaskedDataset(
            tokens=self.tokens,
            lengths=self.lengths,
            items=self.items,
            masking=self.masking,
            pad=self.pad,
            content=self.content,
            epoch=epoch,
            tells_targets=self.tells_targets,
            row_order=self.row_order,
        )


def write_rows(folder: Path, rows: Iterable[Flat], ordinary: np.ndarray) -> Flat:
    """Write one dataset, in chunks of rows, and the digest of its tokens to
    the new folder ``folder``.

    ``ordinary``: the tokens that may be masked. Returns the memory-mapped tokens.
    """
    folder.mkdir()
    with (
        FlatFile(folder, "tokens", np.int32) as file,
        ArrayFile(folder / "ordinary.npy", np.int64) as counts,
    ):
        for some in rows:
            file.add(some)
            total = np.concatenate([[0], np.cumsum(np.isin(some.values, ordinary), dtype=np.int64)])
            counts.add(np.diff(total[some.offsets]))
    tokens = open_flat(folder, "tokens")
    write_content(folder, flat_digest(tokens))
    return tokens


def open_rows(folder: Path, pad: int, masking: Masking, *, varying: bool) -> MaskedDataset:
    """Map the files of ``write_rows`` into memory. ``varying``: with new masks in each epoch."""
    tokens = open_flat(folder, "tokens")
    kind = VaryingMasks if varying else MaskedDataset
    return kind(
        tokens=tokens,
        lengths=tokens.lengths,
        items=masking.items(np.load(folder / "ordinary.npy", allow_pickle=False)),
        masking=masking,
        pad=pad,
        content=read_content(folder),
    )


def empty_dataset(pad: int) -> MaskedDataset:
    """Return a dataset without rows."""
    none = np.empty(0, np.int64)
    tokens = Flat(none.astype(np.int32), np.zeros(1, np.int64))
    masking = Masking(probability=0.15, mask=0, ordinary=none, size=0, seed=0)
    return MaskedDataset(
        tokens=tokens, lengths=none, items=none, masking=masking, pad=pad, content=""
    )
