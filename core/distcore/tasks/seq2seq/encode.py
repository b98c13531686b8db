"""From checked pairs to tokens: the prefix before each source, and behind each target the token that ends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from distcore.tasks.parts import Part
from distcore.tasks.seq2seq.options import Seq2SeqOptions
from distcore.tasks.seq2seq.pairs import Flat
from distcore.tasks.seq2seq.rows import Pairs
from distcore.tasks.tokenizing import tokenize


def encode(part: Part[Pairs], tokenizer: Any, options: Seq2SeqOptions) -> tuple[Flat, Flat, dict[str, int]]:
    """Return the tokens of sources and targets, and how many of each were cut.

    Raises DataError for a row of whose source or target nothing is left.
    """
    sources, targets = zip(*part.values(), strict=True)
    source, cut = encode_sources(tokenizer, sources, options)
    target, targets_cut = _tokens(tokenizer, targets, options.max_target_len, targets=True)
    target = _ended(target, tokenizer.eos_token_id, options.max_target_len)
    common = _prefix_tokens(tokenizer, options.prefix)
    for name, flat, before, length in (
        ("source", source, common, options.max_seq_len),
        ("target", target, 0, options.max_target_len),
    ):
        empty = np.flatnonzero(_own(flat, tokenizer) <= before)
        if len(empty):
            setting = "--max-seq-len" if name == "source" else "--set task_options.max_target_len=N"
            behind = f" behind the prefix, which has {before}" if before else ""
            problem = f"the {name} is cut off entirely: no token of it is left{behind}; raise {setting} (now {length})"
            raise part.problem(int(empty[0]), problem)
    return source, target, {"sources_cut": cut, "targets_cut": targets_cut}


def encode_sources(tokenizer: Any, sources: Iterable[str], options: Seq2SeqOptions) -> tuple[Flat, int]:
    """Return the tokens of each source behind the prefix, cut to ``max_seq_len``, and how many were cut."""
    return _tokens(tokenizer, [options.prefix + text for text in sources], options.max_seq_len, targets=False)


def _tokens(tokenizer: Any, texts: Iterable[str], length: int, *, targets: bool) -> tuple[Flat, int]:
    tokens, lengths, cut = tokenize(tokenizer, list(texts), length, targets=targets)
    return Flat(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)), cut


def _ended(flat: Flat, end: int | None, length: int) -> Flat:
    """Put the token that ends an answer behind each row without it: not every tokenizer writes it."""
    if end is None:
        return flat
    rows = []
    for start, stop in zip(flat.offsets, flat.offsets[1:], strict=False):
        row = flat.values[start:stop]
        rows.append(row if len(row) and row[-1] == end else np.append(row[: length - 1], np.int32(end)))
    return Flat(np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64))


def _own(flat: Flat, tokenizer: Any) -> np.ndarray:
    """Return how many tokens of each row stand for its text, int64, shape ``(rows,)``: special ones do not."""
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    total = np.concatenate([[0], np.cumsum(~np.isin(flat.values, list(special)))])
    found: np.ndarray = np.diff(total[flat.offsets])
    return found


def _prefix_tokens(tokenizer: Any, prefix: str) -> int:
    """Return the number of tokens of the prefix alone; the spaces at its end may become part of the next word."""
    tokens = tokenizer(prefix.rstrip(), add_special_tokens=False)["input_ids"] if prefix.rstrip() else []
    return len(tokens)
