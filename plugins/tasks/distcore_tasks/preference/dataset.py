"""Preferences as flat token arrays, memory-mapped: a prompt, and two answers to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distcore_data import RowOrder
from distcore_tasks.preference.rows import NAMES
from distcore_tasks.shared.jagged import (
    Flat,
    flat_digest,
    flat_rows,
    open_flat,
    read_content,
    write_content,
    write_flat,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PreferenceDataset:
    """Prompts with two answers; implements ``distcore.Dataset``."""

    texts: dict[str, Flat]
    """Tokens of ``prompt``, ``chosen`` and ``rejected``; answers have the end token."""
    pad: int
    """Padding token."""
    content: str
    """SHA-256 over all tokens, in hexadecimal."""
    mismatched: bool = False
    """True if batches also pair each prompt with the next row's chosen answer, as kto needs."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""

    @property
    def pads(self) -> bool:
        """True: each sequence is padded to the longest."""
        return True

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all sequences of each row, int64, shape ``(rows,)``."""
        prompt, chosen, rejected = (self.texts[name].lengths for name in NAMES)
        lengths: np.ndarray = 2 * prompt + chosen + rejected
        return lengths

    @property
    def items(self) -> np.ndarray:
        """Ones: the mean loss is over rows."""
        return np.ones(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.texts["prompt"].offsets) - 1

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the sequences of the rows ``indices``, int64 ``(n,)``.

        All chosen ones come first, then all rejected ones, and with ``mismatched`` the mismatched
        ones. ``input_ids``, ``attention_mask`` and ``answer``, which is 1 at tokens of the answer,
        are int64 ``(sequences, longest)``; ``rows`` are n ones.
        """
        import torch

        prompts = [self.texts["prompt"].row(index) for index in indices]
        answers = [self.texts["chosen"].row(index) for index in indices]
        answers += [self.texts["rejected"].row(index) for index in indices]
        if self.mismatched:
            next_rows = (indices + 1) % len(self)
            answers += [self.texts["chosen"].row(index) for index in next_rows]

        # Each block of answers belongs to the same prompts, in the same order.
        sequence_prompts = prompts * (len(answers) // max(1, len(prompts)))
        pairs = list(zip(sequence_prompts, answers, strict=True))
        shape = (len(pairs), max(len(prompt) + len(answer) for prompt, answer in pairs))
        tokens = np.full(shape, self.pad, np.int64)
        mask = np.zeros(shape, np.int64)
        is_answer = np.zeros(shape, np.int64)
        for line, (prompt, answer) in enumerate(pairs):
            begin, end = len(prompt), len(prompt) + len(answer)
            tokens[line, :begin] = prompt
            tokens[line, begin:end] = answer
            mask[line, :end] = 1
            is_answer[line, begin:end] = 1
        tables = {
            "input_ids": tokens,
            "attention_mask": mask,
            "answer": is_answer,
            "rows": np.ones(len(indices)),
        }
        return {name: torch.from_numpy(table) for name, table in tables.items()}


def write_preferences(folder: Path, texts: dict[str, Flat]) -> None:
    """Write the tokens of a dataset, and their digest, to the new ``folder``."""
    folder.mkdir()
    for name in NAMES:
        write_flat(folder, name, texts[name])
    write_content(folder, flat_digest(*(texts[name] for name in NAMES)))


def open_preferences(folder: Path, pad: int, *, mismatched: bool) -> PreferenceDataset:
    """Map the files of ``write_preferences`` into memory."""
    texts = {name: open_flat(folder, name) for name in NAMES}
    return PreferenceDataset(
        texts=texts, pad=pad, content=read_content(folder), mismatched=mismatched
    )


def empty_dataset(pad: int) -> PreferenceDataset:
    """Return a dataset without rows."""
    return PreferenceDataset(texts={name: flat_rows([]) for name in NAMES}, pad=pad, content="")
