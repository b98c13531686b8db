"""Tokenize and truncate texts or pairs of texts.

This works in chunks, so that neither texts nor tokens need fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

CHUNK = 4096
"""Maximum number of rows to tokenize in one call: enough to keep every core busy."""
CHARACTERS = 2**20
"""Number of characters, or words, that ends a chunk, so that its tokens fit into memory."""
R = TypeVar("R", bound=str | tuple[Sized, ...])


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a chunk of texts."""

    values: np.ndarray
    """Tokens of all texts, concatenated, int32, shape ``(sum of lengths,)``."""
    types: np.ndarray
    """Token types: the tokenizer's numbers of the text in a pair, int8; empty for single texts."""
    lengths: np.ndarray
    """Tokens of each text, int64, shape ``(texts,)``."""
    cut: int
    """Number of texts cut."""


def chunks(rows: Iterable[R]) -> Iterator[list[R]]:
    """Yield rows in chunks for a tokenizer.

    A row is a text, or a tuple of texts or lists of words.
    """
    chunk: list[R] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row) if isinstance(row, str) else sum(map(len, row))
        if len(chunk) == CHUNK or size >= CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def tokenize(
    tokenizer: Any, texts: Iterable[str], max_length: int, *, targets: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokenize all texts with a transformers tokenizer, each cut to ``max_length`` tokens.

    ``targets``: the texts are answers. Returns all tokens, concatenated, int32
    ``(sum of lengths,)``, the lengths, int64 ``(texts,)``, and the number of texts cut.
    """
    parts = [
        tokenize_chunk(tokenizer, chunk, max_length, targets=targets) for chunk in chunks(texts)
    ]
    tokens = _joined(parts)
    return tokens.values, tokens.lengths, tokens.cut


def tokenize_pairs(
    tokenizer: Any, texts: Iterable[str], seconds: Iterable[str], max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Tokenize pairs of texts, each pair cut to ``max_length`` tokens, from the longer text first.

    Returns tokens, token types, lengths and the number of pairs cut, as ``tokenize`` does. Token
    types, int8, are the tokenizer's numbers of the text in a pair, one per token.
    """
    parts = []
    for chunk in chunks(zip(texts, seconds, strict=True)):
        first_texts, second_texts = zip(*chunk, strict=True)
        columns = {"text": list(first_texts), "text_pair": list(second_texts)}
        parts.append(_chunk(tokenizer, columns, max_length))
    tokens = _joined(parts)
    return tokens.values, tokens.types, tokens.lengths, tokens.cut


def token_lists(tokenizer: Any, texts: Iterable[str], *, special: bool) -> Iterator[list[int]]:
    """Yield the tokens of each text, however many. ``special``: with special tokens."""
    for chunk in chunks(texts):
        encoding = tokenizer(
            chunk, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        yield from encoding["input_ids"]


def ended(tokens: list[int], end: list[int]) -> list[int]:
    """Return ``tokens`` with one end token at the end.

    A text may end with its own, which is not repeated. ``end`` holds the end token, or nothing if
    the tokenizer has none.
    """
    has_end = bool(end) and tokens[-1:] == end
    return tokens if has_end else tokens + end


def tokenize_chunk(
    tokenizer: Any, texts: list[str], max_length: int, *, targets: bool = False
) -> Tokens:
    """Tokenize the texts of one chunk, as ``tokenize`` does."""
    # Some tokenizers encode answers for another language, or with another start token.
    argument = "text_target" if targets else "text"
    return _chunk(tokenizer, {argument: texts}, max_length)


def _chunk(tokenizer: Any, texts: Mapping[str, list[str]], max_length: int) -> Tokens:
    """Tokenize ``texts``, the arguments of a tokenizer's call.

    Without a ``text_pair`` there are no token types.
    """
    encoding = _call(tokenizer, texts, max_length)
    rows = encoding["input_ids"]
    # Only these may have been cut.
    full = [number for number, row in enumerate(rows) if len(row) == max_length]
    cut = 0
    if encoding.encodings:
        cut = sum(bool(encoding.encodings[number].overflowing) for number in full)
    elif full:
        # A slow tokenizer does not return the tokens that it cuts off: allow one more.
        full_texts = {name: [values[number] for number in full] for name, values in texts.items()}
        longer_rows = _call(tokenizer, full_texts, max_length + 1)["input_ids"]
        cut = sum(len(row) > max_length for row in longer_rows)
    return Tokens(
        values=_flat(rows, np.int32),
        types=_flat(encoding.get("token_type_ids", ()), np.int8),
        lengths=np.fromiter(map(len, rows), np.int64, len(rows)),
        cut=cut,
    )


def _joined(parts: list[Tokens]) -> Tokens:
    """Return the tokens of all chunks as those of one."""
    return Tokens(
        values=_flat((part.values for part in parts), np.int32),
        types=_flat((part.types for part in parts), np.int8),
        lengths=_flat((part.lengths for part in parts), np.int64),
        cut=sum(part.cut for part in parts),
    )


def _call(tokenizer: Any, texts: Mapping[str, list[str]], max_length: int) -> Any:
    """Return the encoding of ``texts``, each cut to ``max_length`` tokens."""
    return tokenizer(
        **texts,
        truncation="longest_first",
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids="text_pair" in texts,
    )


def _flat(rows: Iterable[Sequence[int] | np.ndarray], dtype: type[np.integer[Any]]) -> np.ndarray:
    """Return the numbers of all rows, concatenated."""
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    # The empty array is for no rows: ``concatenate`` refuses an empty list.
    return np.concatenate([np.empty(0, dtype), *arrays])
