"""Tokenize texts into rows. A longer text becomes several rows, or is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from distcore import ConfigError
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.rows import Texts
from distcore_tasks.shared.jagged import Flat, flat_rows
from distcore_tasks.shared.splits import Part
from distcore_tasks.shared.tokenize_rows import chunks, token_lists


def encode(part: Part[Texts], tokenizer: Any, options: MaskedOptions) -> Iterator[tuple[Flat, int, list[int]]]:
    """Yield the rows of all texts, in order and in chunks, each with the number of texts cut, and of rows of each text.

    Raises ConfigError if rows are too short for the tokenizer's special tokens.
    """
    before, behind = special_tokens_around(tokenizer)
    room = options.max_seq_len - len(before) - len(behind)
    if room < 1:
        taken = f"the tokenizer puts {len(before) + len(behind)} special tokens around each row"
        raise ConfigError(f"max_seq_len = {options.max_seq_len}: {taken}, which leaves no room for others")
    for texts in chunks(part.values()):
        rows, cut, made = [], 0, []
        for tokens in token_lists(tokenizer, texts, special=False):
            last = len(tokens) if options.split_texts else min(room, len(tokens))
            cut += last < len(tokens)
            rows += [[*before, *tokens[at : min(at + room, last)], *behind] for at in range(0, last, room)]
            made.append(len(range(0, last, room)))
        yield flat_rows(rows), cut, made


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    [plain], [whole] = (list(token_lists(tokenizer, ["a"], special=special)) for special in (False, True))
    at = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[:at], whole[at + len(plain) :]


def ordinary_tokens(tokenizer: Any) -> np.ndarray:
    """Return the tokens of the vocabulary that are not special, int64, ascending."""
    return np.asarray(sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)), np.int64)
