"""The tokenizer of built-in models: byte-level, with an end token after every text, as in T5."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import processors

from distcore_tasks.shared.vocabulary import train_byte_level

PAD, END = "<pad>", "</s>"
"""The padding token, which also starts every answer, and the end token."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a tokenizer with at most ``vocab_size`` tokens, special
    tokens included, for transformers.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_byte_level(texts, vocab_size, (PAD, END))
    end = (END, tokenizer.token_to_id(END))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=None, special_tokens=[end]
    )
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
