"""Tokenize checked preferences: a prompt, and two answers that each end with the end token."""

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
    """Return the tokens of all rows by the name of their text, and the number of cut rows.

    A row is cut to ``length`` tokens of prompt and answer. Refuses rows without any token of their
    answers.
    """
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    rows_cut = 0
    for chunk in chunks(rows):
        prompt_texts, chosen_texts, rejected_texts = zip(*chunk, strict=True)
        encoded = zip(
            prompt_tokens(tokenizer, prompt_texts),
            token_lists(tokenizer, chosen_texts, special=False),
            token_lists(tokenizer, rejected_texts, special=False),
            strict=True,
        )
        for prompt, *answers in encoded:
            longest_answer = max(0, length - len(prompt))
            if not longest_answer:
                problem = f"the answers are cut off entirely: {len(prompt)} tokens come before them"
                row = len(tokens["prompt"])
                refuse(row, f"{problem}; raise --max-seq-len ({length})")
            chosen, rejected = (np.asarray(ended(answer, end), np.int32) for answer in answers)
            rows_cut += max(len(chosen), len(rejected)) > longest_answer
            tokens["prompt"].append(np.asarray(prompt, np.int32))
            tokens["chosen"].append(chosen[:longest_answer])
            tokens["rejected"].append(rejected[:longest_answer])
    return {name: flat_rows(texts_tokens) for name, texts_tokens in tokens.items()}, rows_cut
