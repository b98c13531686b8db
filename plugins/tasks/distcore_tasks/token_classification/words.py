"""Tokenize rows of words, and record the first token of each word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from distcore import ModelError
from distcore_tasks.shared.jagged import IGNORED, Flat, flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer

PROBES = ("a", "the", "Ada", "9")
"""Words by which a tokenizer is tried."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Words:
    """Tokenized words of some rows."""

    tokens: Flat
    """Tokens of each row."""
    begins: Flat
    """For the first token of each word the word's number, from 0; ``IGNORED`` for other tokens."""
    count: np.ndarray
    """Words of each row, including those without a token, int64, shape ``(rows,)``."""

    def count_judged(self) -> np.ndarray:
        """Return the number of words of each row that have a token, int64, shape ``(rows,)``."""
        total = np.concatenate([[0], np.cumsum(self.begins.values >= 0, dtype=np.int64)])
        counts: np.ndarray = np.diff(total[self.begins.offsets])
        return counts


def load_words_tokenizer(name: str, folder: Path) -> Any:
    """Load a tokenizer that marks the starts of words. Raises ModelError, one line,
    for one that cannot.
    """
    tokenizer = load_tokenizer(name, folder)
    if not tokenizer.is_fast:
        raise ModelError(
            f"model {name}: token classification needs a fast tokenizer, which knows where words"
            " begin"
        )
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    # as in GPT-2: "a" is not the token " a"
    if isinstance(splitter, ByteLevel) and not splitter.add_prefix_space:
        tokenizer = load_tokenizer(name, folder, add_prefix_space=True)
        # some classes ignore the argument
        tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    return tokenizer


def tokenize_words(tokenizer: Any, rows: Sequence[list[str]], max_length: int) -> Words:
    """Tokenize rows of words, at least one, in one call, each row cut to ``max_length`` tokens.

    The pieces of a word are those that it has inside of running text, also if it is the first.
    """
    space = space_before_words(tokenizer)
    spaced = [[f"{space}{word}" for word in words] for words in rows]
    encoding = tokenizer(spaced, is_split_into_words=True, truncation=True, max_length=max_length)
    begins = [_begins(encoding.word_ids(number)) for number in range(len(rows))]
    count = np.fromiter(map(len, rows), np.int64, len(rows))
    return Words(tokens=flat_rows(encoding["input_ids"]), begins=flat_rows(begins), count=count)


def space_before_words(tokenizer: Any) -> str:
    """Return what to write before each word that is tokenized by itself: a space, or nothing.

    Measured, since no class tells: a tokenizer may mark the start of a word by the space before it
    (byte-level parts of a sequence, Metaspace that prepends nothing, normalizers that replace
    spaces), or by itself.
    """
    for word in PROBES:
        in_text = _pieces(tokenizer, f"{word} {word}")
        alone = _pieces(tokenizer, word)
        if (
            in_text != alone * 2
            and in_text[-len(spaced := _pieces(tokenizer, f" {word}")) :] == spaced
        ):
            return " "
    return ""


def _pieces(tokenizer: Any, word: str) -> list[int]:
    """Return the tokens of what is given as one word, which may have a space in it."""
    pieces: list[int] = tokenizer([word], is_split_into_words=True, add_special_tokens=False)[
        "input_ids"
    ]
    return pieces


def _begins(words: list[int | None]) -> np.ndarray:
    """Return the number of the word at the first token of each word, and
    ``IGNORED`` at other tokens.
    """
    numbers = np.asarray([IGNORED if word is None else word for word in words], np.int32)
    numbers[1:][numbers[1:] == numbers[:-1]] = IGNORED
    return numbers
