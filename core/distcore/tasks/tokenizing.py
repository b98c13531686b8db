"""Texts, or pairs of texts, to tokens, cut to a length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

CHUNK = 4096
"""Rows tokenised in one call: enough to keep every core busy, few enough to fit into memory."""


def tokenize(
    tokenizer: Any, texts: Sequence[str], max_length: int, *, targets: bool = False
) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokenise all texts with a transformers tokenizer, each cut to ``max_length`` tokens; ``targets``: as answers.

    Returns all tokens one after the other, int32 ``(sum of lengths,)``, the lengths, int64 ``(texts,)``, and how many
    texts were cut.
    """
    # Some tokenizers write an answer in another language, or begin it with another token.
    tokens, _, lengths, cut = _tokenize(tokenizer, {"text_target" if targets else "text": texts}, max_length)
    return tokens, lengths, cut


def tokenize_pairs(
    tokenizer: Any, texts: Sequence[str], seconds: Sequence[str], max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Tokenise pairs of texts, each pair cut to ``max_length`` tokens, from the longer of its two texts first.

    Returns the tokens, lengths and number of pairs cut as ``tokenize`` does, and after the tokens their types, int8, of
    the same shape: which of the two texts a token belongs to, as the tokenizer numbers them.
    """
    return _tokenize(tokenizer, {"text": texts, "text_pair": seconds}, max_length)


def _tokenize(
    tokenizer: Any, texts: Mapping[str, Sequence[str]], max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Tokenise ``texts``, the arguments of a tokenizer's call; without a ``text_pair`` there are no types."""
    tokens: list[np.ndarray] = []
    types: list[np.ndarray] = []
    lengths: list[int] = []
    cut = 0
    for start in range(0, len(next(iter(texts.values()))), CHUNK):
        some = {name: list(values[start : start + CHUNK]) for name, values in texts.items()}
        found = _call(tokenizer, some, max_length)
        rows = found["input_ids"]
        full = [number for number, row in enumerate(rows) if len(row) == max_length]
        if found.encodings:
            cut += sum(bool(found.encodings[number].overflowing) for number in full)
        elif full:  # a tokenizer written in Python keeps nothing of what it cuts off
            again = {name: [values[number] for number in full] for name, values in some.items()}
            cut += sum(len(row) > max_length for row in _call(tokenizer, again, max_length + 1)["input_ids"])
        lengths += map(len, rows)
        tokens.append(_flat(rows, np.int32))
        types.append(_flat(found.get("token_type_ids", ()), np.int8))
    return _flat(tokens, np.int32), _flat(types, np.int8), np.asarray(lengths, dtype=np.int64), cut


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
