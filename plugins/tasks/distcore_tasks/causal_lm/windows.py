"""Windows: rows, or parts of longer ones, as the lines of a batch, padded or packed.

A row has one token more than it reads: its last target is the token after its last input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distcore_tasks.shared.jagged import IGNORED, Spans, flat_rows

if TYPE_CHECKING:
    from torch import Tensor

COUNTED, FIRST = 1, 2
"""Flags of a token. ``COUNTED``: it is a target. ``FIRST``: it starts an isolated document."""
PROMPT = 32
"""Maximum length, in tokens, of a prompt that evaluation cuts from a document."""
Column = tuple[np.ndarray, int]
"""A value for each token of a batch, and the fill value for padding."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Windows:
    """Windows of some rows. Window i reads ``lengths[i]`` tokens from ``starts[i]`` on."""

    tokens: np.ndarray
    """Tokens of all rows, int32, ``(tokens,)``."""
    flags: np.ndarray
    """``COUNTED`` and ``FIRST`` for each token, uint8, ``(tokens,)``."""
    starts: np.ndarray
    """Index of each window's first token, int64, ``(windows,)``."""
    lengths: np.ndarray
    """Tokens that each window reads, int64, ``(windows,)``."""
    ends: np.ndarray
    """Index after the last token of each window's row, int64, ``(windows,)``."""
    rows: np.ndarray
    """Row of each window, int64, ``(windows,)``."""
    begins: np.ndarray
    """Place in its row of each window's first token, int64, ``(windows,)``."""

    def tensors(self, pad: int, *, packed: bool) -> dict[str, Tensor]:
        """Return int64 tensors ``(lines, longest)``; a line of ``packed`` windows has several.

        ``input_ids``, ``labels`` and ``row``, the number of the row. Padded windows have an
        ``attention_mask``. Packed ones have ``position_ids``, which restart at 0 with each window,
        and ``token_mask``, which is 0 for padding. ``place``, that of a token in its row, is there
        for packed windows, and for padded ones if a row has several.
        """
        import torch

        # Of each token of the batch: its window, its offset there, and its index among all tokens.
        window = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first_of_window = np.cumsum(self.lengths) - self.lengths
        offset = np.arange(len(window)) - first_of_window[window]
        index = self.starts[window] + offset
        after = index + 1
        # A row of one token reads it, and has no target.
        has_no_target = self.ends - self.starts == 1
        if has_no_target.any():
            after = np.where(has_no_target[window], index, after)
        is_target = self.flags[after] & COUNTED
        if has_no_target.any():
            is_target[has_no_target[window]] = 0
        columns: dict[str, Column] = {
            "input_ids": (self.tokens[index], pad),
            "labels": (np.where(is_target, self.tokens[after], IGNORED), IGNORED),
            "row": (self.rows[window], 0),
        }
        if packed:
            line, column = pack(self.lengths)
            # Padding has position 0, too: each padding token is a row of its own, and no other
            # row attends to it.
            columns["position_ids"] = (_positions(offset, self.flags[index]), 0)
            columns["place"] = (self.begins[window] + offset, 0)
            columns["token_mask"] = (np.ones_like(offset), 0)
        else:
            line, column = np.arange(len(self.lengths)), np.zeros(len(self.lengths), np.int64)
            columns["attention_mask"] = (np.ones_like(offset), 0)
        at = (line[window], column[window] + offset)
        shape = (int(line.max(initial=-1)) + 1, int(self.lengths.max(initial=0)))
        tables = {name: _table(shape, at, *values) for name, values in columns.items()}
        # Dropout masks follow from a token's place in its row. If no row is cut, the core counts
        # the places itself.
        if not packed and self.begins.any():
            tables["place"] = _table(shape, at, self.begins[window], 0) + np.arange(shape[1])
        return {name: torch.from_numpy(table) for name, table in tables.items()}


def cut(tokens: Spans, flags: Spans, window: int) -> Windows:
    """Return the windows of rows, each of at most ``window`` tokens that it reads."""
    tokens_read_by_row = np.maximum(tokens.lengths - 1, 1)
    windows_of_row = -(-tokens_read_by_row // window)
    row_of_window = np.repeat(np.arange(len(tokens)), windows_of_row)
    first_window_of_row = np.cumsum(windows_of_row) - windows_of_row
    number_in_row = np.arange(len(row_of_window)) - first_window_of_row[row_of_window]
    begins = number_in_row * window
    return Windows(
        tokens=tokens.values,
        flags=flags.values,
        starts=tokens.starts[row_of_window] + begins,
        lengths=np.minimum(window, tokens_read_by_row[row_of_window] - begins),
        ends=tokens.ends[row_of_window],
        rows=row_of_window,
        begins=begins,
    )


def pack(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the line of each window, and its start in the line, both int64, ``(n,)``.

    First-fit decreasing bin packing: the longest windows first, each into the first line with room
    for it. A line is as long as the longest window.
    """
    line, begin = np.zeros_like(lengths), np.zeros_like(lengths)
    longest = int(lengths.max(initial=0))
    sizes = list[int]()  # tokens of each line
    for window in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[window])
        with_room = (number for number, size in enumerate(sizes) if size + length <= longest)
        number = next(with_room, len(sizes))
        if number == len(sizes):
            sizes.append(0)
        line[window], begin[window] = number, sizes[number]
        sizes[number] += length
    return line, begin


def prompt_size(flags: np.ndarray) -> int:
    """Return the number of tokens of a row before its first target.

    A document gives its first half, up to ``PROMPT``. ``flags``: those of the row's tokens.
    """
    targets = np.flatnonzero(flags[1:] & COUNTED)
    if not len(targets) or not targets[0]:  # no prompt of its own
        return max(1, min(PROMPT, (len(flags) - 1) // 2))
    return int(targets[0]) + 1


def completion(tokens: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return the targets right after a row's prompt, int32 ``(tokens,)``.

    They end before the next token that is no target.
    """
    begin = prompt_size(flags)
    no_targets = np.flatnonzero((flags[begin:] & COUNTED) == 0)
    end = begin + int(no_targets[0]) if len(no_targets) else len(tokens)
    return tokens[begin:end]


def left_padded(prompts: Sequence[np.ndarray], pad: int) -> dict[str, Tensor]:
    """Return ``prompt_ids`` and ``prompt_mask`` of prompts, int64 ``(n, longest)``."""
    import torch

    tokens, mask = flat_rows(prompts).padded(np.arange(len(prompts)), pad, left=True)
    tables = {"prompt_ids": tokens, "prompt_mask": mask}
    return {name: torch.from_numpy(table.astype(np.int64)) for name, table in tables.items()}


def _positions(offset: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return the position of each token in its row, or in its document if these are isolated.

    ``offset``: place of each token in its window. ``flags``: those of the token.
    """
    numbers = np.arange(len(offset))
    is_first = (offset == 0) | ((flags & FIRST) > 0)
    # Number of the last first token up to each token.
    begins = np.maximum.accumulate(np.where(is_first, numbers, 0))
    positions: np.ndarray = numbers - begins
    return positions


def _table(
    shape: tuple[int, int], at: tuple[np.ndarray, np.ndarray], values: np.ndarray, fill: int
) -> np.ndarray:
    """Return a table of ``fill`` with ``values`` at these lines and columns, int64 ``shape``."""
    table = np.full(shape, fill, np.int64)
    table[at] = values
    return table
