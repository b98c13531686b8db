"""Tokenize texts into rows. A longer text becomes several rows, or is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from distcore import ConfigError
from distcore_tasks.masked_lm.options import MaskedOptions
from distcore_tasks.masked_lm.rows import Texts
from distcore_tasks.shared.jagged import Flat, flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.splits import Part, Refuse
from distcore_tasks.shared.tokenize_rows import chunks, token_lists


def make_tokenizer(options: MaskedOptions, train: Callable[[], Any]) -> Any:
    """Return the model's tokenizer, or for a built-in model one that is trained on some of
    the texts of ``train``.
    """
    if not options.from_scratch:
        return load_tokenizer(options.model, options.model_folder())
    from distcore_tasks.shared.wordpiece import MAX_ROWS, as_transformers, train_wordpiece

    texts = train()
    sample = list(islice(texts, 0, None, -(-len(texts) // MAX_ROWS)))
    return as_transformers(train_wordpiece(sample, options.tokenizer.vocab_size))


def encode(
    part: Part[Texts], tokenizer: Any, options: MaskedOptions
) -> Iterator[tuple[Flat, int, list[int]]]:
    """Yield the rows of all texts, in order and in chunks, each with the number of texts cut, and
    of rows of each text.

    Raises ConfigError if rows are too short for the tokenizer's special tokens.
    """
    before, behind = special_tokens_around(tokenizer)
    room = room_for(tokenizer, options)
    for texts in chunks(part.values()):
        rows, cut, made = [], 0, []
        for tokens in token_lists(tokenizer, texts, special=False):
            last = len(tokens) if options.split_texts else min(room, len(tokens))
            cut += last < len(tokens)
            rows += [
                [*before, *tokens[at : min(at + room, last)], *behind]
                for at in range(0, last, room)
            ]
            made.append(len(range(0, last, room)))
        yield flat_rows(rows), cut, made


def encode_some(
    options: MaskedOptions, tokenizer: Any, texts: Sequence[str], refuse: Refuse
) -> Iterator[tuple[np.ndarray]]:
    """Yield the tokens of each text, which is cut."""
    before, behind = special_tokens_around(tokenizer)
    room = room_for(tokenizer, options)
    for tokens in token_lists(tokenizer, texts, special=False):
        yield (np.asarray([*before, *tokens[:room], *behind], np.int32),)


def room_for(tokenizer: Any, options: MaskedOptions) -> int:
    """Return the most tokens of a row that are not special. Raises ConfigError if there
    is room for none.
    """
    taken = sum(map(len, special_tokens_around(tokenizer)))
    if options.max_seq_len <= taken:
        what = (
            f"the tokenizer puts {taken} special tokens around each row, which leaves no room for"
            " others"
        )
        raise ConfigError(f"max_seq_len = {options.max_seq_len}: {what}")
    return options.max_seq_len - taken


def special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    [plain], [whole] = (
        list(token_lists(tokenizer, ["a"], special=special)) for special in (False, True)
    )
    at = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[:at], whole[at + len(plain) :]


def ordinary_tokens(tokenizer: Any) -> np.ndarray:
    """Return the tokens of the vocabulary that are not special, int64, ascending."""
    return np.asarray(
        sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)), np.int64
    )
