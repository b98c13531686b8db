"""Tokenize checked pairs, with a prefix before each source, and an end token after each target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from distcore_tasks.seq2seq.dataset import PairFiles, finish_pairs
from distcore_tasks.seq2seq.languages import load_translator, special_tokens_of
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.seq2seq.rows import Pairs
from distcore_tasks.shared.jagged import Flat
from distcore_tasks.shared.splits import Part, Refuse
from distcore_tasks.shared.tokenize_rows import Tokens, chunks, tokenize_chunk


def encode(
    part: Part[Pairs], refuse: Refuse, tokenizer: Any, options: Seq2SeqOptions, folder: Path
) -> tuple[Flat, Flat, dict[str, int]]:
    """Write tokens and texts of all rows to ``folder``, the new folder of a dataset.

    Returns the memory-mapped tokens of sources and targets, and the numbers of cut ones. Refuses
    rows whose source or target has no token left.
    """
    cut, place = {"sources_cut": 0, "targets_cut": 0}, 0
    with PairFiles(folder) as files:
        for pairs in chunks(part.values()):
            source, target, *cut_here = _pairs(pairs, place, refuse, tokenizer, options)
            files.add(source, target, pairs)
            cut = {
                name: number + here
                for (name, number), here in zip(cut.items(), cut_here, strict=True)
            }
            place += len(pairs)
    return *finish_pairs(folder), cut


def encode_some(
    options: Seq2SeqOptions, tokenizer: Any, pairs: Sequence[tuple[str, ...]], refuse: Refuse
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of the source and of the target of each pair."""
    if pairs:
        source, target, _, _ = _pairs(pairs, 0, refuse, tokenizer, options)
        yield from ((source.row(place), target.row(place)) for place in range(len(pairs)))


def _pairs(
    pairs: Sequence[tuple[str, ...]],
    place: int,
    refuse: Refuse,
    tokenizer: Any,
    options: Seq2SeqOptions,
) -> tuple[Flat, Flat, int, int]:
    """Return the tokens of sources and targets, and the numbers of cut ones. ``place``:
    that of the first pair.
    """
    sources, targets = zip(*pairs, strict=True)
    read = _sources(tokenizer, sources, options)
    written = tokenize_chunk(tokenizer, list(targets), options.max_target_len, targets=True)
    source = _flat(read)
    target = _ended(
        _flat(written), tokenizer.eos_token_id, options.max_target_len, _behind_end(tokenizer)
    )
    _check_left(
        refuse,
        place,
        "source",
        _own(source, tokenizer),
        _prefix_tokens(tokenizer, options.prefix),
        options,
    )
    _check_left(refuse, place, "target", _own(target, tokenizer), 0, options)
    return source, target, read.cut, written.cut


def make_tokenizer(options: Seq2SeqOptions, train: Callable[[], Iterable[tuple[str, ...]]]) -> Any:
    """Return the model's tokenizer, or for a built-in model one that is trained on pairs."""
    if not options.from_scratch:
        return load_translator(options)
    from distcore_tasks.seq2seq.vocabulary import train_tokenizer

    return train_tokenizer(chain.from_iterable(train()), options.tokenizer.vocab_size)


def _check_left(
    refuse: Refuse, place: int, name: str, own: np.ndarray, before: int, options: Seq2SeqOptions
) -> None:
    """Refuse rows without tokens of their own. ``own``: their numbers for the
    rows from ``place`` on.
    """
    for empty in np.flatnonzero(own <= before).tolist():
        setting, length = {
            "source": ("--max-seq-len", options.max_seq_len),
            "target": ("--set task_options.max_target_len=N", options.max_target_len),
        }[name]
        behind = f" behind the prefix, which has {before}" if before else ""
        problem = (
            f"the {name} is cut off entirely: no token of it is left{behind}; raise {setting} (now"
            f" {length})"
        )
        refuse(place + empty, problem)


def _flat(tokens: Tokens) -> Flat:
    return Flat(tokens.values, np.concatenate([[0], np.cumsum(tokens.lengths)]).astype(np.int64))


def encode_sources(tokenizer: Any, sources: Sequence[str], options: Seq2SeqOptions) -> Flat:
    """Return the tokens of each source with the prefix, cut to ``max_seq_len``.
    ``sources`` is one chunk.
    """
    return _flat(_sources(tokenizer, sources, options))


def _sources(tokenizer: Any, sources: Sequence[str], options: Seq2SeqOptions) -> Tokens:
    return tokenize_chunk(
        tokenizer, [options.prefix + text for text in sources], options.max_seq_len
    )


def _behind_end(tokenizer: Any) -> int:
    """Return the number of tokens that the tokenizer writes behind the end token of a target,
    such as its language.
    """
    around, end = special_tokens_of(tokenizer, targets=True), tokenizer.eos_token_id
    return len(around) - 1 - around.index(end) if end in around else 0


def _ended(flat: Flat, end: int | None, length: int, behind: int = 0) -> Flat:
    """Let each row have one end token: some tokenizers do not write it, and some texts end with
    one of their own.

    ``behind``: the number of tokens of each row behind its end.
    """
    if end is None:
        return flat
    rows = []
    for start, stop in zip(flat.offsets, flat.offsets[1:], strict=False):
        row, rest = flat.values[start : stop - behind], flat.values[stop - behind : stop]
        if len(row) > 1 and row[-1] == row[-2] == end:
            row = row[:-1]
        if not len(row) or row[-1] != end:
            row = np.append(row[: length - 1 - behind], np.int32(end))
        rows.append(np.append(row, rest))
    return Flat(np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64))


def _own(flat: Flat, tokenizer: Any) -> np.ndarray:
    """Return the number of tokens of each row that are not special, int64, shape ``(rows,)``."""
    around = (
        *special_tokens_of(tokenizer, targets=False),
        *special_tokens_of(tokenizer, targets=True),
    )
    special = {*tokenizer.all_special_ids, *around} - {tokenizer.unk_token_id}
    total = np.concatenate([[0], np.cumsum(~np.isin(flat.values, list(special)))])
    own_tokens: np.ndarray = np.diff(total[flat.offsets])
    return own_tokens


def _prefix_tokens(tokenizer: Any, prefix: str) -> int:
    """Return the number of tokens of the prefix, without trailing spaces, which may
    join the next word.
    """
    tokens = (
        tokenizer(prefix.rstrip(), add_special_tokens=False)["input_ids"] if prefix.rstrip() else []
    )
    return len(tokens)
