"""Rows of a language model: slices of flat token arrays, which are memory-mapped files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore_data import RowOrder
from distcore_tasks.shared.arrays import ArrayFile, array_blocks, digest_arrays, map_array
from distcore_tasks.shared.jagged import IGNORED, flat_rows, read_content, write_content

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2**20
"""Tokens whose targets are counted at a time."""
COUNTED, FIRST = 1, 2
"""Flags of a token. ``COUNTED``: it is a target. ``FIRST``: it starts an isolated document."""
PROMPT = 32
"""Maximum length, in tokens, of a prompt that evaluation cuts from a document."""
Column = tuple[np.ndarray, int]
"""A value for each token of a batch, and the fill value for padding."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """The rows of one dataset. Row i reads ``lengths[i]`` tokens from ``starts[i]`` on."""

    tokens: np.ndarray
    """All rows, concatenated, int32, ``(tokens,)``.

    A row's last target is the token after its last input token.
    """
    flags: np.ndarray
    """``COUNTED`` and ``FIRST`` for each token, uint8, shape ``(tokens,)``."""
    starts: np.ndarray
    """Index of each row's first token, int64, shape ``(rows,)``."""
    lengths: np.ndarray
    """Tokens that each row reads, int64, shape ``(rows,)``."""

    def items(self) -> np.ndarray:
        """Return the number of targets of each row, int64, shape ``(rows,)``."""
        counts = np.empty(len(self.starts), np.int64)
        # So many rows at a time that their tokens fit into memory.
        tokens_of_longest = int(self.lengths.max(initial=0)) + 1
        step = max(1, BLOCK // tokens_of_longest)
        for first in range(0, len(counts), step):
            rows = slice(first, first + step)
            starts, lengths = self.starts[rows], self.lengths[rows]
            begin = int(starts[0])
            end = int(starts[-1] + lengths[-1]) + 1
            is_counted = self.flags[begin:end] & COUNTED
            # Entry i is the number of targets among the first i tokens.
            targets_before = np.concatenate([[0], np.cumsum(is_counted, dtype=np.int64)])
            # A row's targets are the tokens after its input tokens.
            first_targets = starts - begin + 1
            counts[rows] = targets_before[first_targets + lengths] - targets_before[first_targets]
        return counts

    def targets(self) -> Iterator[np.ndarray]:
        """Yield the target tokens, int32, block by block."""
        blocks = zip(array_blocks(self.tokens), array_blocks(self.flags), strict=True)
        for tokens, flags in blocks:
            yield tokens[(flags & COUNTED) > 0]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SequenceDataset:
    """Rows of tokens, each padded to the longest of its batch; implements ``distcore.Dataset``."""

    arrays: Arrays
    """Tokens, flags and rows."""
    items: np.ndarray
    """Targets of each row, int64, shape ``(rows,)``: the weight of the row in the mean loss."""
    pad: int
    """Token that fills up the shorter rows of a batch."""
    prompts: int
    """Number of rows with a prompt for ``generate``. These are the first rows."""
    content: str
    """SHA-256 over tokens, flags and rows, in hexadecimal."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each row reads, int64, shape ``(rows,)``."""
        return self.arrays.lengths

    def __len__(self) -> int:
        return len(self.arrays.lengths)

    @property
    def pads(self) -> bool:
        """True: each row is padded to the longest of its batch."""
        return True

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as int64 tensors on the CPU.

        ``input_ids``, ``attention_mask``, ``labels`` and ``row``, the number of the row in the
        batch, are ``(n, longest)``; ``lengths`` is ``(n,)``. With ``prompts`` there are also
        ``prompt_ids`` and ``prompt_mask``, ``(n, longest prompt)``, padded on the left. The mask of
        a row without a prompt is all zeros.
        """
        import torch

        tokens, flags = self.arrays.tokens, self.arrays.flags
        # Of each token of the batch: its row, its offset there, and its index among all tokens.
        lengths = self.arrays.lengths[indices]
        row = np.repeat(np.arange(len(indices)), lengths)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = self.arrays.starts[indices][row] + offset
        is_target = flags[index + 1] & COUNTED
        columns = {
            "input_ids": (tokens[index], self.pad),
            "labels": (np.where(is_target, tokens[index + 1], IGNORED), IGNORED),
            "row": (row, 0),
        }
        columns |= self._order(offset, flags[index])

        line, begin = self._layout(lengths)
        place = (line[row], begin[row] + offset)
        shape = (int(line.max(initial=-1)) + 1, int(lengths.max(initial=0)))
        batch = {name: _table(shape, place, *column) for name, column in columns.items()}
        batch["lengths"] = torch.from_numpy(lengths)
        if self.prompts:
            batch |= self.prompts_of(indices, indices < self.prompts)
        return batch

    def _layout(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's line in the table, and its first column there, both int64 ``(n,)``."""
        return np.arange(len(lengths)), np.zeros(len(lengths), np.int64)

    def _order(self, offset: np.ndarray, flags: np.ndarray) -> dict[str, Column]:
        """Return the columns that define attention, by name.

        ``offset``: place of each token in its row.
        """
        return {"attention_mask": (np.ones_like(offset), 0)}

    def prompts_of(self, indices: np.ndarray, has_prompt: np.ndarray) -> dict[str, Tensor]:
        """Return the tokens before the first target of each row, as ``left_padded`` does.

        A document gives its first half, up to ``PROMPT``. Rows have an empty prompt where
        ``has_prompt``, bool ``(n,)``, is False.
        """
        prompts = []
        for index, is_wanted in zip(indices.tolist(), has_prompt.tolist(), strict=True):
            prompts.append(self._prompt(index) if is_wanted else np.empty(0, np.int64))
        return left_padded(prompts, self.pad)

    def _prompt(self, index: int) -> np.ndarray:
        """Return the tokens of a row's prompt, int64 ``(tokens,)``."""
        start, length = int(self.arrays.starts[index]), int(self.arrays.lengths[index])
        is_target = self.arrays.flags[start + 1 : start + length + 1] & COUNTED
        size = int(np.argmax(is_target)) + 1
        if size == 1:  # no prompt of its own
            size = max(1, min(PROMPT, length // 2))
        return self.arrays.tokens[start : start + size].astype(np.int64)

    def completion(self, index: int) -> np.ndarray:
        """Return the targets right after a row's prompt, int32 ``(tokens,)``.

        They end before the next token that is no target.
        """
        begin = int(self.arrays.starts[index]) + len(self._prompt(index))
        end = int(self.arrays.starts[index] + self.arrays.lengths[index]) + 1
        no_targets = np.flatnonzero((self.arrays.flags[begin:end] & COUNTED) == 0)
        if len(no_targets):
            end = begin + int(no_targets[0])
        return self.arrays.tokens[begin:end]


def left_padded(prompts: Sequence[np.ndarray], pad: int) -> dict[str, Tensor]:
    """Return ``prompt_ids`` and ``prompt_mask`` of prompts, int64 ``(n, longest)``."""
    import torch

    tokens, mask = flat_rows(prompts).padded(np.arange(len(prompts)), pad, left=True)
    tables = {"prompt_ids": tokens, "prompt_mask": mask}
    return {name: torch.from_numpy(table.astype(np.int64)) for name, table in tables.items()}


class SequenceFiles:
    """The files of one dataset, in the new ``folder``; a context manager that closes them."""

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
        """Append tokens and their flags."""
        self._tokens.add(tokens)
        self._flags.add(flags)


def finish_sequences(folder: Path, starts: np.ndarray, lengths: np.ndarray) -> Arrays:
    """Write the rows' bounds, their target counts and a digest next to the tokens.

    Returns memory-mapped arrays.
    """
    np.save(folder / "starts.npy", starts)
    np.save(folder / "lengths.npy", lengths)
    arrays = _map_arrays(folder)
    np.save(folder / "items.npy", arrays.items())
    write_content(folder, digest_arrays(*vars(arrays).values()))
    return arrays


def open_sequences(folder: Path, pad: int, *, prompts: int) -> SequenceDataset:
    """Map the files of ``finish_sequences`` into memory.

    ``prompts``: number of rows with a prompt.
    """
    return SequenceDataset(
        arrays=_map_arrays(folder),
        items=map_array(folder / "items.npy"),
        pad=pad,
        prompts=prompts,
        content=read_content(folder),
    )


def empty_dataset(pad: int) -> SequenceDataset:
    """Return a dataset without rows."""
    empty = np.empty(0, np.int64)
    arrays = Arrays(
        tokens=np.empty(0, np.int32), flags=np.empty(0, np.uint8), starts=empty, lengths=empty
    )
    return SequenceDataset(arrays=arrays, items=empty, pad=pad, prompts=0, content="")


def _table(
    shape: tuple[int, int], place: tuple[np.ndarray, np.ndarray], values: np.ndarray, fill: int
) -> Tensor:
    """Return a table of ``fill`` with ``values`` at these lines and columns, int64 ``shape``."""
    import torch

    table = np.full(shape, fill, np.int64)
    table[place] = values
    return torch.from_numpy(table)


def _map_arrays(folder: Path) -> Arrays:
    """Map the arrays of a folder into memory, one file for each field."""
    names = Arrays.__dataclass_fields__
    return Arrays(**{name: map_array(folder / f"{name}.npy") for name in names})
