"""Train a byte-level BPE tokenizer, as in GPT-2, on the training rows of a built-in model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_CHARACTERS = 20_000_000
"""Maximum number of characters for training a vocabulary; later rows are ignored."""


def train_byte_level(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with at most ``vocab_size`` tokens; the
    ``special`` tokens come first.

    The tokenizer can encode every text, and keeps every character. The same texts give the
    same tokenizer in every
    process: it numbers bytes and pairs in a fixed order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts), trainer)
    return tokenizer


def _first(texts: Iterable[str]) -> list[str]:
    total, block = 0, []
    for text in texts:
        if total >= MAX_CHARACTERS:
            break
        block.append(text)
        total += len(text)
    return block
