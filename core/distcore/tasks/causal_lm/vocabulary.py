"""A byte-level tokenizer, as GPT-2 has it, trained on the training rows, for built-in models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
"""Token that ends a document and an answer; it also pads."""
ROLES = ("system", "user", "assistant", "tool")
"""Who may speak in a conversation."""
SPECIAL = (END, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The built-in models' conversation: each message between the token of its role and ``END``."""
MAX_CHARACTERS = 20_000_000
"""Most characters that a vocabulary is learned from: the first rows that reach so many."""


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer with at most ``vocab_size`` tokens, special tokens included, for transformers.

    Every text can be written with it, and it keeps every character. The same texts give the same tokenizer in every
    process: it numbers bytes and pairs in a fixed order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts), trainer)
    return _as_transformers(tokenizer)


def _first(texts: Sequence[str]) -> list[str]:
    total, some = 0, []
    for text in texts:
        if total >= MAX_CHARACTERS:
            break
        some.append(text)
        total += len(text)
    return some


def _as_transformers(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    wrapper: Any = PreTrainedTokenizerFast
    made = wrapper(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=list(SPECIAL[1:])
    )
    made.chat_template = CHAT_TEMPLATE
    return made
