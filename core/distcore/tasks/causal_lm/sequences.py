"""Tokens of all rows as flat arrays on disk, memory-mapped; a row is a stretch of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

CONTENT = "content.sha256"
"""File with the digest of a data set's rows."""
COUNTED, FIRST = 1, 2
"""Flags of a token: it counts as a target; it is the first of a document that sees nothing before it."""
IGNORED = -100
"""Label of a position without a target."""
PROMPT = 32
"""Most tokens of a document that evaluation gives the model to go on from."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The rows of one data set: row i reads ``lengths[i]`` tokens from ``starts[i]``, and predicts one after each."""

    tokens: np.ndarray
    """All rows one after the other, int32, shape ``(tokens,)``; a row's last target lies behind what it reads."""
    flags: np.ndarray
    """``COUNTED`` and ``FIRST`` for each token, uint8, shape ``(tokens,)``."""
    starts: np.ndarray
    """Index of each row's first token, int64, shape ``(rows,)``."""
    lengths: np.ndarray
    """Tokens that each row reads, int64, shape ``(rows,)``."""

    def items(self) -> np.ndarray:
        """Return how many targets each row has, int64, shape ``(rows,)``."""
        total = np.concatenate([[0], np.cumsum(self.flags & COUNTED, dtype=np.int64)])
        found: np.ndarray = total[self.starts + self.lengths + 1] - total[self.starts + 1]
        return found

    def targets(self) -> np.ndarray:
        """Return the tokens that are predicted, int32, shape ``(targets,)``."""
        found: np.ndarray = self.tokens[(self.flags & COUNTED) > 0]
        return found


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SequenceDataset:
    """Rows of tokens; implements ``Dataset`` and ``Identified`` of ``distcore.plugin.task``."""

    arrays: Arrays
    """Tokens, flags and rows."""
    items: np.ndarray
    """Targets of each row, int64, shape ``(rows,)``: what it counts in the mean loss."""
    pad: int
    """Token that fills up the shorter rows of a batch that is not packed."""
    packed: bool
    """Whether short rows of a batch share a sequence."""
    prompts: int
    """How many rows, the first ones, have a prompt beside them, for the model to go on from."""
    content: str
    """SHA-256 over tokens, flags and rows, in hexadecimal."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each row reads, int64, shape ``(rows,)``."""
        return self.arrays.lengths

    def __len__(self) -> int:
        return len(self.arrays.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU.

        ``input_ids``, ``labels`` and ``row``, the number of the row in the batch, are ``(n, longest)``, with
        ``attention_mask``; or, packed, ``(sequences, longest)``: as many rows in a sequence as find room beside the
        longest, with ``position_ids``, which begin again at 0 with each. ``lengths`` is ``(n,)``. With ``prompts`` also
        ``prompt_ids`` and ``prompt_mask``, ``(n, longest prompt)``, padded on the left; a row without one has none.
        """
        import torch

        lengths = self.arrays.lengths[indices]
        row = np.repeat(np.arange(len(indices)), lengths)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = self.arrays.starts[indices][row] + offset
        line, begin = _packed(lengths) if self.packed else (np.arange(len(indices)), np.zeros(len(indices), np.int64))
        place = (line[row], begin[row] + offset)
        shape = (int(line.max(initial=-1)) + 1, int(lengths.max(initial=0)))
        targets = np.where(self.arrays.flags[at + 1] & COUNTED, self.arrays.tokens[at + 1], IGNORED)
        columns = {"input_ids": (self.arrays.tokens[at], self.pad), "labels": (targets, IGNORED), "row": (row, 0)}
        if self.packed:  # what fills up a sequence is at position 0, too, and so sees nothing but itself
            columns["position_ids"] = (_positions(offset, self.arrays.flags[at]), 0)
        else:
            columns["attention_mask"] = (np.ones_like(row), 0)
        found = {name: _table(shape, place, *column) for name, column in columns.items()}
        found["lengths"] = torch.from_numpy(lengths)
        return found | self._prompts(indices) if self.prompts else found

    def _prompts(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return what comes before the first target of each row; of a document, its first half or ``PROMPT`` tokens."""
        none = np.empty(0, np.int64)
        return left_padded([self._prompt(row) if row < self.prompts else none for row in indices.tolist()], self.pad)

    def _prompt(self, index: int) -> np.ndarray:
        start, length = int(self.arrays.starts[index]), int(self.arrays.lengths[index])
        given = int(np.argmax(self.arrays.flags[start + 1 : start + length + 1] & COUNTED)) + 1
        if given == 1:  # no prompt of its own
            given = max(1, min(PROMPT, length // 2))
        return self.arrays.tokens[start : start + given].astype(np.int64)


def left_padded(prompts: Sequence[np.ndarray], pad: int) -> dict[str, Tensor]:
    """Return prompts, int64 ``(tokens,)`` each, as ``prompt_ids`` and ``prompt_mask``, int64 ``(n, longest)``."""
    import torch

    longest = max(map(len, prompts), default=0)
    prompt_ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(prompt_ids)
    for row, prompt in enumerate(prompts):
        prompt_ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    return {"prompt_ids": prompt_ids, "prompt_mask": mask}


def write_arrays(folder: Path, arrays: Arrays) -> None:
    """Write the arrays of one data set, and their digest, into the new folder ``folder``."""
    folder.mkdir()
    digest = hashlib.sha256()
    for name, column in vars(arrays).items():
        np.save(folder / f"{name}.npy", column)
        digest.update(np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<")).data)
    np.save(folder / "items.npy", arrays.items())
    (folder / CONTENT).write_text(digest.hexdigest(), encoding="ascii")


def open_sequences(folder: Path, pad: int, *, packed: bool, prompts: int) -> SequenceDataset:
    """Map what ``write_arrays`` wrote into memory; ``prompts``: how many rows have one."""
    arrays = Arrays(**{name: _map(folder / f"{name}.npy") for name in Arrays.__dataclass_fields__})
    content = (folder / CONTENT).read_text(encoding="ascii")
    items = _map(folder / "items.npy")
    return SequenceDataset(arrays=arrays, items=items, pad=pad, packed=packed, prompts=prompts, content=content)


def no_sequences(pad: int) -> SequenceDataset:
    """Return a data set without rows."""
    none = np.empty(0, np.int64)
    arrays = Arrays(tokens=none.astype(np.int32), flags=none.astype(np.uint8), starts=none, lengths=none)
    return SequenceDataset(arrays=arrays, items=none, pad=pad, packed=False, prompts=0, content="")


def _positions(offset: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return each token's place in its row, or in its document where documents are apart."""
    here = np.arange(len(offset))
    begins = (offset == 0) | ((flags & FIRST) > 0)
    found: np.ndarray = here - np.maximum.accumulate(np.where(begins, here, 0))
    return found


def _packed(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the sequence that it is packed into, and where in it the row begins, both int64, ``(n,)``.

    First fit decreasing: the longest rows first, each into the first sequence that has room for it.
    """
    line, begin = np.zeros_like(lengths), np.zeros_like(lengths)
    filled, longest = list[int](), int(lengths.max(initial=0))
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        free = (number for number, size in enumerate(filled) if size + length <= longest)
        number = next(free, len(filled))
        if number == len(filled):
            filled.append(0)
        line[row], begin[row] = number, filled[number]
        filled[number] += length
    return line, begin


def _table(shape: tuple[int, int], place: tuple[np.ndarray, np.ndarray], values: np.ndarray, fill: int) -> Tensor:
    import torch

    table = np.full(shape, fill, np.int64)
    table[place] = values
    return torch.from_numpy(table)


def _map(path: Path) -> np.ndarray:
    # As a plain array: indexing numpy's memmap class is several times slower.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
