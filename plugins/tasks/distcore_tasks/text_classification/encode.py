"""From texts, or pairs of texts, to tokens, by the tokenizer of the model or, for a built-in model, a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from distcore import ConfigError
from distcore_tasks.shared.jagged import Flat, flat_of
from distcore_tasks.shared.lazy_rows import Reread, Values
from distcore_tasks.shared.padding import pads_left
from distcore_tasks.shared.pretrained import check_vocabulary, load_tokenizer, read_config, with_pad_token
from distcore_tasks.shared.tokenize_rows import chunks, tokenize, tokenize_pairs
from distcore_tasks.text_classification.options import TextOptions


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Encoded:
    """The tokens of some rows."""

    tokens: Flat
    """Their tokens, int32."""
    types: Flat | None
    """Which text of a pair each token belongs to, int8; ``None`` where the model is not told."""
    cut: int = 0
    """Rows that were longer."""


def encode(tokenizer: Any, texts: Sequence[str], seconds: Sequence[str] | None, options: TextOptions) -> Encoded:
    """Return the tokens of ``texts`` or, with ``seconds``, of pairs; raises ModelError for one the model has not."""
    if seconds is None:
        tokens, lengths, cut = tokenize(tokenizer, texts, options.max_seq_len)
        types = None
    else:
        tokens, types, lengths, cut = tokenize_pairs(tokenizer, texts, seconds, options.max_seq_len)
    if not options.from_scratch:
        check_vocabulary(options.model, options.model_folder(), int(tokens.max(initial=0)))
    told = None if types is None or not _takes_types(tokenizer, options) else flat_of(types, lengths)
    return Encoded(tokens=flat_of(tokens, lengths), types=told, cut=cut)


def encode_all(
    tokenizer: Any, texts: Values[str], seconds: Values[str] | None, options: TextOptions
) -> Iterator[Encoded]:
    """Yield what ``encode`` returns, of some rows at a time."""
    if seconds is None:
        yield from (encode(tokenizer, some, None, options) for some in chunks(texts))
        return
    for pairs in chunks(zip(texts, seconds, strict=True)):
        one, two = zip(*pairs, strict=True)
        yield encode(tokenizer, one, two, options)


def tokenizer_of(options: TextOptions, texts: Values[str], seconds: Values[str] | None) -> Any:
    """Return the model's tokenizer; that of a built-in model is trained on the texts.

    It pads with the token and on the side that training does, which an export takes along. Raises ModelError, or
    ConfigError for a length that has no room for a pair.
    """
    tokenizer = _tokenizer(options, texts, seconds)
    least = tokenizer.num_special_tokens_to_add(pair=True) + 2
    if seconds is not None and options.max_seq_len < least:
        raise ConfigError(f"max_seq_len = {options.max_seq_len}: a pair of texts takes at least {least} tokens")
    if pads_left(options):
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"  # the latter has it saved
    return with_pad_token(tokenizer)


def _tokenizer(options: TextOptions, texts: Values[str], seconds: Values[str] | None) -> Any:
    if not options.from_scratch:
        return load_tokenizer(options.model, options.model_folder())
    from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

    words = Reread(lambda: chain(texts, seconds or ()), len(texts) + len(seconds or ()))
    return as_transformers(train_wordpiece(words, options.tokenizer.vocab_size), pairs=seconds is not None)


def _takes_types(tokenizer: Any, options: TextOptions) -> bool:
    """Return True if the tokenizer gives token types and the model has room for two of them."""
    if "token_type_ids" not in tokenizer.model_input_names:
        return False
    return options.from_scratch or read_config(options.model, options.model_folder()).get("type_vocab_size", 2) > 1
