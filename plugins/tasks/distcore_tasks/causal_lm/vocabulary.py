"""The tokenizer of built-in models, and their chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distcore_tasks.shared.vocabulary import train_byte_level

END = "<|end|>"
"""End token of documents and answers; also the padding token."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages in a conversation."""
SPECIAL = (END, *(f"<|{role}|>" for role in ROLES))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Chat template of built-in models: each message is between the token of its role and ``END``."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a tokenizer with at most ``vocab_size`` tokens, special
    tokens included, for transformers.
    """
    from transformers import PreTrainedTokenizerFast

    wrapper: Any = PreTrainedTokenizerFast
    made = wrapper(
        tokenizer_object=train_byte_level(texts, vocab_size, SPECIAL),
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(SPECIAL[1:]),
    )
    made.chat_template = CHAT_TEMPLATE
    return made
