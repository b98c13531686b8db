"""Texts to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    cut = 0
    for start in range(0, len(texts), CHUNK):
        some = list(texts[start : start + CHUNK])
        found = _tokens(tokenizer, some, max_length, targets)
        rows = found["input_ids"]
        full = [number for number, row in enumerate(rows) if len(row) == max_length]
        if found.encodings:
            cut += sum(bool(found.encodings[number].overflowing) for number in full)
        elif full:  # a tokenizer written in Python keeps nothing of what it cuts off
            longer = _tokens(tokenizer, [some[number] for number in full], max_length + 1, targets)["input_ids"]
            cut += sum(len(row) > max_length for row in longer)
        lengths += map(len, rows)
        parts.append(np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return tokens, np.asarray(lengths, dtype=np.int64), cut


def token_lists(tokenizer: Any, texts: Sequence[str], *, special: bool) -> Iterator[list[int]]:
    """Yield the tokens of each text, however many; ``special``: with those that the tokenizer puts around a text."""
    for start in range(0, len(texts), CHUNK):
        some = list(texts[start : start + CHUNK])
        yield from tokenizer(some, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


def _tokens(tokenizer: Any, texts: list[str], max_length: int, targets: bool) -> Any:
    # Some tokenizers write an answer in another language, or begin it with another token.
    written = {"text_target": texts} if targets else {"text": texts}
    return tokenizer(
        **written, truncation=True, max_length=max_length, return_attention_mask=False, return_token_type_ids=False
    )
