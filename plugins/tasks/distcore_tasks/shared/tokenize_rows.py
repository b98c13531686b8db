"""Tokenize and truncate texts or pairs of texts, in chunks, so that neither texts nor tokens
need fit into memory.
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
    """Yield rows in chunks for a tokenizer. A row is a text, or a tuple of
    texts or lists of words.
    """
    some: list[R] = []
    size = 0
    for row in rows:
        some.append(row)
        size += len(row) if isinstance(row, str) else sum(map(len, row))
        if len(some) == CHUNK or size >= CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some


def tokenize(
    tokenizer: Any, texts: Iterable[str], max_length: int, *, targets: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokenize all texts with a transformers tokenizer, each cut to ``max_length``
    tokens; ``targets``: as answers.

    Returns all tokens, concatenated, int32 ``(sum of lengths,)``, the lengths, int64 ``(texts,)``,
    and the number of texts cut.
    """
    tokens = _joined(
        [tokenize_chunk(tokenizer, some, max_length, targets=targets) for some in chunks(texts)]
    )
    return tokens.values, tokens.lengths, tokens.cut


def tokenize_pairs(
    tokenizer: Any, texts: Iterable[str], seconds: Iterable[str], max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Tokenize pairs of texts, each pair cut to ``max_length`` tokens, from the longer text first.

    Returns tokens, token types, lengths and the number of pairs cut, as ``tokenize`` does. Token
    types, int8, are the tokenizer's numbers of the text in a pair, one per token.
    """
    columns = (zip(*some, strict=True) for some in chunks(zip(texts, seconds, strict=True)))
    parts = [
        _chunk(tokenizer, {"text": list(one), "text_pair": list(two)}, max_length)
        for one, two in columns
    ]
    tokens = _joined(parts)
    return tokens.values, tokens.types, tokens.lengths, tokens.cut


def token_lists(tokenizer: Any, texts: Iterable[str], *, special: bool) -> Iterator[list[int]]:
    """Yield the tokens of each text, without a limit. ``special``: with
    the tokenizer's special tokens.
    """
    for some in chunks(texts):
        yield from tokenizer(
            some, add_special_tokens=special, return_attention_mask=False, verbose=False
        )["input_ids"]


def ended(tokens: list[int], end: list[int]) -> list[int]:
    """Return ``tokens`` with one end token: texts may end with theirs. ``end``: the token,
    or nothing without one.
    """
    return tokens if end and tokens[-1:] == end else tokens + end


def tokenize_chunk(
    tokenizer: Any, texts: list[str], max_length: int, *, targets: bool = False
) -> Tokens:
    """Tokenize the texts of one chunk, as ``tokenize`` does."""
    # Some tokenizers encode answers for another language, or with another start token.
    return _chunk(tokenizer, {"text_target" if targets else "text": texts}, max_length)


def _chunk(tokenizer: Any, texts: Mapping[str, list[str]], max_length: int) -> Tokens:
    """Tokenize ``texts``, the arguments of a tokenizer's call. Without a ``text_pair`` there
    are no token types.
    """
    cut = 0
    encoding = _call(tokenizer, texts, max_length)
    rows = encoding["input_ids"]
    full = [number for number, row in enumerate(rows) if len(row) == max_length]
    if encoding.encodings:
        cut = sum(bool(encoding.encodings[number].overflowing) for number in full)
    elif full:  # a slow tokenizer does not return the tokens that it cuts off
        again = {name: [values[number] for number in full] for name, values in texts.items()}
        cut = sum(
            len(row) > max_length for row in _call(tokenizer, again, max_length + 1)["input_ids"]
        )
    types = _flat(encoding.get("token_type_ids", ()), np.int8)
    return Tokens(
        _flat(rows, np.int32), types, np.fromiter(map(len, rows), np.int64, len(rows)), cut
    )


def _joined(parts: list[Tokens]) -> Tokens:
    return Tokens(
        _flat((part.values for part in parts), np.int32),
        _flat((part.types for part in parts), np.int8),
        _flat((part.lengths for part in parts), np.int64),
        sum(part.cut for part in parts),
    )


def _call(tokenizer: Any, texts: Mapping[str, list[str]], max_length: int) -> Any:
    return tokenizer(
        **texts,
        truncation="longest_first",
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids="text_pair" in texts,
    )


def _flat(rows: Iterable[Sequence[int] | np.ndarray], dtype: type[np.integer[Any]]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype=dtype) for row in rows)])
