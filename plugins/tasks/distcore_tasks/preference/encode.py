"""Tokenize checked preferences: a prompt, and after it two answers that each end
with the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from distcore_tasks.causal_lm.encode import prompt_tokens
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.preference.rows import NAMES
from distcore_tasks.shared.jagged import Flat, flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer, set_pad_token
from distcore_tasks.shared.splits import Refuse
from distcore_tasks.shared.tokenize_rows import chunks, ended, token_lists


def encode_some(
    length: int, tokenizer: Any, rows: Sequence[tuple[str, ...]], refuse: Refuse
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the tokens of prompt, chosen and rejected answer of each row."""
    texts, _ = encode(rows, refuse, tokenizer, length)
    return (tuple(texts[name].row(place) for name in NAMES) for place in range(len(rows)))


def make_tokenizer(options: PairOptions, train: Callable[[], Iterable[tuple[str, ...]]]) -> Any:
    """Return the model's tokenizer, or for a built-in model one that is trained on rows."""
    if not options.from_scratch:
        return set_pad_token(load_tokenizer(options.model, options.model_folder()))
    return train_tokenizer(chain.from_iterable(train()), options.tokenizer.vocab_size)


def encode(
    rows: Iterable[tuple[str, ...]], refuse: Refuse, tokenizer: Any, length: int
) -> tuple[dict[str, Flat], int]:
    """Return the tokens of all rows, and the number of rows cut to ``length``
    tokens with their prompt.

    Refuses rows without any token of their answers.
    """
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    kept: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    cut = 0
    for some in chunks(rows):
        prompts, chosen, rejected = zip(*some, strict=True)
        answers = (token_lists(tokenizer, texts, special=False) for texts in (chosen, rejected))
        for prompt, *both in zip(prompt_tokens(tokenizer, prompts), *answers, strict=True):
            room = max(0, length - len(prompt))
            if not room:
                what = f"the answers are cut off entirely: {len(prompt)} tokens come before them"
                refuse(len(kept["prompt"]), f"{what}; raise --max-seq-len ({length})")
            whole = [np.asarray(ended(answer, end), np.int32) for answer in both]
            cut += any(len(answer) > room for answer in whole)
            for name, row in zip(
                NAMES, (np.asarray(prompt, np.int32), *(a[:room] for a in whole)), strict=True
            ):
                kept[name].append(row)
    return {name: flat_rows(part) for name, part in kept.items()}, cut
