"""Tokenize texts or pairs of texts. A built-in model's tokenizer is trained on them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from distcore import ConfigError
from distcore_tasks.shared.jagged import Flat, flat_of
from distcore_tasks.shared.lazy_rows import LazyValues, Values
from distcore_tasks.shared.padding import pads_left
from distcore_tasks.shared.pretrained import (
    check_vocabulary,
    load_tokenizer,
    read_config,
    set_pad_token,
)
from distcore_tasks.shared.tokenize_rows import chunks, tokenize, tokenize_pairs
from distcore_tasks.text_classification.options import TextOptions


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Encoded:
    """Tokens of a chunk of rows."""

    tokens: Flat
    """Tokens of each row, int32."""
    types: Flat | None
    """Token types, int8; ``None`` if the model takes none."""
    cut: int = 0
    """Number of rows cut."""


def encode(
    tokenizer: Any, texts: Sequence[str], seconds: Sequence[str] | None, options: TextOptions
) -> Encoded:
    """Tokenize ``texts`` or, with ``seconds``, pairs. Raises ModelError for a token
    outside the model's vocabulary.
    """
    if seconds is None:
        tokens, lengths, cut = tokenize(tokenizer, texts, options.max_seq_len)
        types = None
    else:
        tokens, types, lengths, cut = tokenize_pairs(tokenizer, texts, seconds, options.max_seq_len)
    if not options.from_scratch:
        check_vocabulary(options.model, options.model_folder(), int(tokens.max(initial=0)))
    used_types = (
        None if types is None or not _takes_types(tokenizer, options) else flat_of(types, lengths)
    )
    return Encoded(tokens=flat_of(tokens, lengths), types=used_types, cut=cut)


def encode_all(
    tokenizer: Any, texts: Values[str], seconds: Values[str] | None, options: TextOptions
) -> Iterator[Encoded]:
    """Yield the results of ``encode``, in chunks of rows."""
    if seconds is None:
        yield from (encode(tokenizer, chunk, None, options) for chunk in chunks(texts))
        return
    for pairs in chunks(zip(texts, seconds, strict=True)):
        firsts, seconds_of_chunk = zip(*pairs, strict=True)
        yield encode(tokenizer, firsts, seconds_of_chunk, options)


def make_tokenizer(options: TextOptions, texts: Values[str], seconds: Values[str] | None) -> Any:
    """Load the model's tokenizer; for a built-in model, train one on the texts.

    Sets the padding token and the padding side; an exported tokenizer has them, too. Raises
    ModelError, or ConfigError if ``max_seq_len`` is too small for a pair.
    """
    tokenizer = _make_tokenizer(options, texts, seconds)
    least = tokenizer.num_special_tokens_to_add(pair=True) + 2
    if seconds is not None and options.max_seq_len < least:
        raise ConfigError(
            f"max_seq_len = {options.max_seq_len}: a pair of texts takes at least {least} tokens"
        )
    if pads_left(options):
        # save_pretrained() writes init_kwargs
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    return set_pad_token(tokenizer)


def _make_tokenizer(options: TextOptions, texts: Values[str], seconds: Values[str] | None) -> Any:
    if not options.from_scratch:
        return load_tokenizer(options.model, options.model_folder())
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    words = LazyValues(lambda: chain(texts, seconds or ()), len(texts) + len(seconds or ()))
    return as_transformers(
        train_wordpiece(words, options.tokenizer.vocab_size), pairs=seconds is not None
    )


def _takes_types(tokenizer: Any, options: TextOptions) -> bool:
    """Return True if the tokenizer returns token types, and the model has
    embeddings for two types.
    """
    if "token_type_ids" not in tokenizer.model_input_names:
        return False
    return (
        options.from_scratch
        or read_config(options.model, options.model_folder()).get("type_vocab_size", 2) > 1
    )
