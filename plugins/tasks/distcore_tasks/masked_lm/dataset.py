"""Rows of tokens, some of which the model has to find: which ones depends on seed, epoch and row alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore.data import row_random
from distcore_tasks.shared.arrays import ArrayFile
from distcore_tasks.shared.jagged import IGNORED, Flat, FlatFile, flat_digest, open_flat, read_content, write_content

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, REPLACED = 0.8, 0.1
"""Of the tokens to be found, the parts that the mask token and a random token stand for; the others stay."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """How rows are masked."""

    probability: float
    """Part of the ordinary tokens of a row that the model has to find."""
    mask: int
    """The mask token."""
    ordinary: np.ndarray
    """Tokens of the vocabulary that are not special, int64, ascending: only these are masked, or put at random."""
    size: int
    """The number behind the largest token."""
    seed: int
    """Of the random numbers."""

    def items(self, ordinary: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row have to be found: the same number in every epoch.

        ``ordinary``: how many of a row's tokens are, int64, shape ``(rows,)``, which the answer has, too.
        """
        wanted = np.rint(self.probability * ordinary).astype(np.int64)
        counts: np.ndarray = np.minimum(np.maximum(wanted, 1), ordinary)
        return counts

    def masked(self, tokens: np.ndarray, count: int, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads of a row, and where the ``count`` tokens stand that it has to find.

        ``tokens`` are the row's, ``(tokens,)``; what is read has their shape and dtype. The same epoch and row give
        the same answer.
        """
        random = row_random(self.seed, epoch, row)
        places = random.choice(np.flatnonzero(self._is_ordinary[tokens]), count, replace=False, shuffle=False)
        drawn, others = random.random(count), random.choice(self.ordinary, count)
        put = np.where(drawn < HIDDEN, self.mask, np.where(drawn < HIDDEN + REPLACED, others, tokens[places]))
        read = tokens.copy()
        read[places] = put
        return read, places

    @cached_property
    def _is_ordinary(self) -> np.ndarray:
        """Whether a token is ordinary, bool, for each token up to the largest that may come."""
        table = np.zeros(self.size, bool)
        table[self.ordinary] = True
        return table


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MaskedDataset:
    """Rows masked as in one epoch; implements ``distcore.Dataset``."""

    tokens: Flat
    """Tokens of all rows."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Tokens of each row that have to be found, int64, shape ``(rows,)``: what it counts in the mean loss."""
    masking: Masking
    """How they are masked."""
    pad: int
    """Token that fills up the shorter rows of a batch."""
    content: str
    """SHA-256 over the tokens, in hexadecimal."""
    epoch: int = 0
    """Whose masks these are; evaluation rows have those of epoch 0 always."""
    tells_targets: bool = False
    """Whether batches say where in their rows, without padding, something has to be found."""

    def __len__(self) -> int:
        return len(self.items)

    def with_targets(self) -> MaskedDataset:
        """Return the same rows, in batches that say where something has to be found."""
        return replace(self, tells_targets=True)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU, padded to the longest of them.

        ``input_ids``, ``attention_mask`` and ``labels`` are ``(n, longest)``; labels are ``IGNORED`` where nothing has
        to be found. If they are to be told, ``targets``, ``(found,)``, is which of the tokens of all rows, without
        padding, have to be found.
        """
        import torch

        tokens, mask = self.tokens.padded(indices, self.pad)
        labels = np.full_like(tokens, IGNORED)
        for place, row in enumerate(indices.tolist()):
            whole = self.tokens.row(row)
            read, places = self.masking.masked(whole, int(self.items[row]), self.epoch, row)
            tokens[place, : len(whole)] = read
            labels[place, places] = whole[places]
        arrays = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        if self.tells_targets:
            arrays["targets"] = np.flatnonzero(labels[mask] != IGNORED)
        return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class VaryingMasks(MaskedDataset):
    """Training rows, masked anew in each epoch."""

    def at(self, epoch: int) -> MaskedDataset:
        """Return the rows as they are in ``epoch``."""
        return MaskedDataset(
            tokens=self.tokens,
            lengths=self.lengths,
            items=self.items,
            masking=self.masking,
            pad=self.pad,
            content=self.content,
            epoch=epoch,
            tells_targets=self.tells_targets,
        )


def write_rows(folder: Path, rows: Iterable[Flat], ordinary: np.ndarray) -> Flat:
    """Write one dataset, some rows at a time, and the digest of its tokens into the new folder ``folder``.

    ``ordinary`` are the tokens that may be masked. Returns the tokens, mapped into memory.
    """
    folder.mkdir()
    with FlatFile(folder, "tokens", np.int32) as file, ArrayFile(folder / "ordinary.npy", np.int64) as counts:
        for some in rows:
            file.add(some)
            total = np.concatenate([[0], np.cumsum(np.isin(some.values, ordinary), dtype=np.int64)])
            counts.add(np.diff(total[some.offsets]))
    tokens = open_flat(folder, "tokens")
    write_content(folder, flat_digest(tokens))
    return tokens


def open_rows(folder: Path, pad: int, masking: Masking, *, varying: bool) -> MaskedDataset:
    """Map what ``write_rows`` wrote into memory; ``varying``: masked anew in each epoch."""
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


def no_rows(pad: int) -> MaskedDataset:
    """Return a dataset without rows."""
    none = np.empty(0, np.int64)
    tokens = Flat(none.astype(np.int32), np.zeros(1, np.int64))
    masking = Masking(probability=0.15, mask=0, ordinary=none, size=0, seed=0)
    return MaskedDataset(tokens=tokens, lengths=none, items=none, masking=masking, pad=pad, content="")
