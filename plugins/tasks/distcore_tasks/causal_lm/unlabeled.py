"""Prompts without answers, in chunks of a file: texts to continue, conversations to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from distcore import ConstantColumn, DataError, FileRows
from distcore_data import row_error
from distcore_tasks.causal_lm.conversations import ChatTemplate
from distcore_tasks.causal_lm.encode import check_template, prompt_tokens
from distcore_tasks.causal_lm.forms import conversation_of, conversation_problem
from distcore_tasks.causal_lm.models import positions
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.windows import left_padded
from distcore_tasks.shared.sources import text_problem
from distcore_tasks.shared.tokenized import GENERATED, TokenizedDatasets

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class UnlabeledPrompts:
    """Implements ``Dataset`` of ``distcore.plugin.task.task``."""

    texts: list[str]
    """The prompts. Conversations are formatted by the chat template."""
    tokens: list[np.ndarray]
    """Tokens of each text, int64 ``(tokens,)``."""
    pad: int
    """Token that fills up the shorter prompts of a batch."""
    lengths: np.ndarray
    """Tokens of each text, int64 ``(rows,)``."""
    items: ConstantColumn
    """Ones."""

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``prompt_ids`` and ``prompt_mask`` of the rows
        ``indices``, as ``left_padded`` does.
        """
        return left_padded([self.tokens[index] for index in indices], self.pad)


def unlabeled_prompts(
    rows: FileRows, options: CausalOptions, data: TokenizedDatasets
) -> UnlabeledPrompts:
    """Return the prompts of ``rows``.

    Raises DataError with file and row, or ModelError without a chat template.
    """
    name, tokenizer = f"data file {rows.file}", data.loaded_tokenizer
    texts: list[str] = []
    tokens: list[np.ndarray] = []
    template = ChatTemplate(tokenizer)
    for number, record in enumerate(rows.records, rows.start):
        text, special = _text(name, number, record, template)
        [prompt] = prompt_tokens(tokenizer, [text], special=special)
        if problem := _length_problem(len(prompt), options):
            raise row_error(name, number, problem)
        texts.append(text)
        tokens.append(np.asarray(prompt, np.int64))
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    items = ConstantColumn(len(texts), 1)
    return UnlabeledPrompts(texts=texts, tokens=tokens, pad=data.pad, lengths=lengths, items=items)


def _text(
    name: str, number: int, record: tuple[Any, ...], template: ChatTemplate
) -> tuple[str, bool]:
    """Return the prompt as text, and True if the tokenizer must add its special tokens."""
    prompt = record[0]
    if not isinstance(prompt, list):
        if problem := text_problem(prompt, "prompt"):
            raise row_error(name, number, problem)
        return str(prompt), True
    if problem := conversation_problem(record):
        raise row_error(name, number, problem)
    # In a file with labels the last message is the answer that the model is to write.
    conversation = conversation_of(record)
    messages = conversation["messages"]
    messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not messages:
        raise row_error(
            name, number, "the only message is the assistant's: give the one that it should answer"
        )
    check_template(name, template.tokenizer)
    try:
        return template.prompt(conversation | {"messages": messages}), False
    except DataError as error:
        raise row_error(name, number, str(error)) from None


def _length_problem(tokens: int, options: CausalOptions) -> str | None:
    """Return the problem of a prompt of this many tokens; ``None`` if the model can
    read and continue it.
    """
    new, places = options.max_new_tokens or GENERATED, positions(options)
    if not tokens:
        return "the prompt has no tokens"
    if tokens > options.max_seq_len:
        most, remedy = options.max_seq_len, "raise task_options.max_seq_len"
    elif places is not None and tokens + new > places:
        most, remedy = places - new, f"set task_options.max_new_tokens below {new}"
    else:
        return None
    return (
        f"the prompt has {tokens} tokens, but at most {most} are allowed: shorten it, or {remedy}"
    )
