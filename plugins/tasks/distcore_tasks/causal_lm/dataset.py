"""Tokens of all rows as flat arrays on disk, memory-mapped; a row is a stretch of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore.data import ArrayFile, array_blocks, digest_arrays, map_array
from distcore_tasks.shared.jagged import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2**20
"""Tokens whose targets are counted at a time."""
CONTENT = "content.sha256"
"""File with the digest of a data set's rows."""
COUNTED, FIRST = 1, 2
"""Flags of a token: it counts as a target; it is the first of a document that sees nothing before it."""
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
        found = np.empty(len(self.starts), np.int64)
        step = max(1, BLOCK // (int(self.lengths.max(initial=0)) + 1))  # rows whose tokens fit into memory
        for first in range(0, len(found), step):
            starts, lengths = self.starts[first : first + step], self.lengths[first : first + step]
            begin, end = int(starts[0]), int(starts[-1] + lengths[-1]) + 1
            total = np.concatenate([[0], np.cumsum(self.flags[begin:end] & COUNTED, dtype=np.int64)])
            found[first : first + step] = total[starts - begin + lengths + 1] - total[starts - begin + 1]
        return found

    def targets(self) -> Iterator[np.ndarray]:
        """Yield the tokens that are predicted, int32, block by block."""
        for tokens, flags in zip(array_blocks(self.tokens), array_blocks(self.flags), strict=True):
            yield tokens[(flags & COUNTED) > 0]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SequenceDataset:
    """Rows of tokens; implements ``distcore.Dataset``."""

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
    apart: bool = False
    """Whether a document sees nothing of the one before it in its row, which needs packing."""
    tells_targets: bool = False
    """Whether batches say where their targets are."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each row reads, int64, shape ``(rows,)``."""
        return self.arrays.lengths

    def __len__(self) -> int:
        return len(self.arrays.lengths)

    @property
    def padding_free(self) -> bool:
        """True if short rows of a batch share a sequence."""
        return self.packed

    def padded(self) -> SequenceDataset | None:
        """Return the same rows, each padded; ``None`` if they have documents that only packing keeps apart."""
        return None if self.apart else replace(self, packed=False, tells_targets=False)

    def with_targets(self) -> SequenceDataset:
        """Return the same rows, in batches that say where targets are.

        Themselves where all places are targets, where rows are padded, and where only packing keeps documents apart.
        """
        some = self.packed and not self.apart and int(self.items.sum()) < int(self.lengths.sum())
        return replace(self, tells_targets=True) if some else self

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU.

        ``input_ids``, ``labels`` and ``row``, the number of the row in the batch, are ``(n, longest)``, with
        ``attention_mask``; or, packed, ``(sequences, longest)``: as many rows in a sequence as find room beside the
        longest, with ``position_ids``, which begin again at 0 with each. ``lengths`` is ``(n,)``. With ``prompts`` also
        ``prompt_ids`` and ``prompt_mask``, ``(n, longest prompt)``, padded on the left; a row without one has none.
        If they are to be told, ``targets`` is where in ``labels``, flattened, there are targets, ``(targets,)``.
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
        if self.tells_targets:
            found["targets"] = (found["labels"].flatten() != IGNORED).nonzero()[:, 0]
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


class SequenceFiles:
    """The files of one data set, in the new folder ``folder``; a context manager, which closes what it writes to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._tokens = ArrayFile(folder / "tokens.npy", np.int32)
        self._flags = ArrayFile(folder / "flags.npy", np.uint8)

    def __enter__(self) -> SequenceFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self._tokens.__exit__(*error)
        self._flags.__exit__(*error)

    @property
    def count(self) -> int:
        """Number of tokens so far."""
        return self._tokens.count

    def add(self, tokens: np.ndarray, flags: np.ndarray) -> None:
        """Append some tokens, and the flags of each."""
        self._tokens.add(tokens)
        self._flags.add(flags)


def finish_sequences(folder: Path, starts: np.ndarray, lengths: np.ndarray) -> Arrays:
    """Write what the rows are, how many targets each has, and a digest, beside their tokens; map all into memory."""
    np.save(folder / "starts.npy", starts)
    np.save(folder / "lengths.npy", lengths)
    arrays = _mapped(folder)
    np.save(folder / "items.npy", arrays.items())
    (folder / CONTENT).write_text(digest_arrays(*vars(arrays).values()), encoding="ascii")
    return arrays


def open_sequences(folder: Path, pad: int, *, packed: bool, prompts: int, apart: bool = False) -> SequenceDataset:
    """Map what ``finish_sequences`` wrote into memory; ``prompts``: how many rows have one; ``apart``: documents."""
    content = (folder / CONTENT).read_text(encoding="ascii")
    items = map_array(folder / "items.npy")
    return SequenceDataset(
        arrays=_mapped(folder), items=items, pad=pad, packed=packed, prompts=prompts, content=content, apart=apart
    )


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


def _mapped(folder: Path) -> Arrays:
    return Arrays(**{name: map_array(folder / f"{name}.npy") for name in Arrays.__dataclass_fields__})
