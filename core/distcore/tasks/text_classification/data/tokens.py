"""Tokenised rows as one flat array on disk, memory-mapped: all ranks of a machine share one copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

CONTENT = "content.sha256"
"""File with the digest of a data set's rows."""
CHUNK = 4096
"""Rows tokenised in one call: enough to keep every core busy, few enough to fit into memory."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class TokenDataset:
    """Tokenised rows, each with its class; implements ``Dataset`` and ``Identified`` of ``distcore.plugin.task``."""

    tokens: np.ndarray
    """All rows one after the other, int32, shape ``(sum of lengths,)``."""
    starts: np.ndarray
    """Index in ``tokens`` at which each row starts, int64, shape ``(rows,)``."""
    lengths: np.ndarray
    """Tokens of each row, int64, shape ``(rows,)``."""
    labels: np.ndarray
    """Class of each row, int64, shape ``(rows,)``."""
    source_rows: np.ndarray
    """Number of each row in the file that it came from, counted from 0, int64, shape ``(rows,)``."""
    items: np.ndarray
    """Ones: each row is one sample of the mean loss."""
    pad: int
    """Token that fills up the shorter rows of a batch."""
    pad_left: bool
    """Whether it stands before the tokens of a row; otherwise behind them."""
    content: str
    """SHA-256 over tokens, lengths and labels, in hexadecimal."""

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as tensors on the CPU, padded to the longest of them.

        ``input_ids`` and ``attention_mask`` are int64 ``(n, longest)``, ``labels`` int64 ``(n,)``.
        """
        import torch

        lengths = self.lengths[indices]
        longest = lengths.max(initial=0)
        columns = np.arange(longest) - ((longest - lengths)[:, None] if self.pad_left else 0)
        mask = (columns >= 0) & (columns < lengths[:, None])
        # Beside a shorter row this reads tokens of its neighbours; the mask then replaces them by padding.
        tokens = self.tokens.take(self.starts[indices][:, None] + columns, mode="clip")
        return {
            "input_ids": torch.from_numpy(np.where(mask, tokens, np.int64(self.pad))),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "labels": torch.from_numpy(self.labels[indices]),
        }


def tokenize(tokenizer: Any, texts: Sequence[str], max_length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokenise all texts with a transformers tokenizer, each cut to ``max_length`` tokens.

    Returns all tokens one after the other, int32 ``(sum of lengths,)``, the lengths, int64 ``(texts,)``, and how many
    texts were cut.
    """
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    cut = 0
    for start in range(0, len(texts), CHUNK):
        some = list(texts[start : start + CHUNK])
        found = _tokens(tokenizer, some, max_length)
        rows = found["input_ids"]
        full = [number for number, row in enumerate(rows) if len(row) == max_length]
        if found.encodings:
            cut += sum(bool(found.encodings[number].overflowing) for number in full)
        elif full:  # a tokenizer written in Python keeps nothing of what it cuts off
            longer = _tokens(tokenizer, [some[number] for number in full], max_length + 1)["input_ids"]
            cut += sum(len(row) > max_length for row in longer)
        lengths += map(len, rows)
        parts.append(np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return tokens, np.asarray(lengths, dtype=np.int64), cut


def _tokens(tokenizer: Any, texts: list[str], max_length: int) -> Any:
    return tokenizer(
        texts, truncation=True, max_length=max_length, return_attention_mask=False, return_token_type_ids=False
    )


def write_tokens(
    folder: Path, tokens: np.ndarray, lengths: np.ndarray, labels: np.ndarray, source_rows: np.ndarray
) -> None:
    """Write the arrays of one data set, and their digest, into the new folder ``folder``."""
    folder.mkdir()
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(folder / "labels.npy", labels)
    np.save(folder / "source_rows.npy", source_rows)
    (folder / CONTENT).write_text(_digest(tokens, lengths, labels), encoding="ascii")


def open_tokens(folder: Path, pad: int, *, pad_left: bool = False) -> TokenDataset:
    """Map the arrays that ``write_tokens`` wrote into memory; ``pad`` is the padding token, ``pad_left`` its side."""
    offsets = _map(folder / "offsets.npy")
    lengths = np.diff(offsets)
    return TokenDataset(
        tokens=_map(folder / "tokens.npy"),
        starts=offsets[:-1],
        lengths=lengths,
        labels=_map(folder / "labels.npy"),
        source_rows=_map(folder / "source_rows.npy"),
        items=np.ones(len(lengths), np.int64),
        pad=pad,
        pad_left=pad_left,
        content=(folder / CONTENT).read_text(encoding="ascii"),
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
    )


def _digest(*columns: np.ndarray) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(np.ascontiguousarray(column, dtype="<i8").data)  # the same bytes on every machine
    return digest.hexdigest()


def _map(path: Path) -> np.ndarray:
    # As a plain array: indexing numpy's memmap class is several times slower.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
