"""Tokenize values of the three forms. In a conversation the answers are targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from distcore import DataError, ModelError
from distcore_tasks.causal_lm.conversations import ChatTemplate
from distcore_tasks.causal_lm.options import CausalOptions, Form
from distcore_tasks.causal_lm.windows import COUNTED, FIRST
from distcore_tasks.rows.pipeline import Refuse
from distcore_tasks.shared.tokenize_rows import chunks, ended, token_lists

Targets = tuple[np.ndarray, np.ndarray]
"""Tokens of a row, int32, and a bool for each that is a target; both have shape ``(tokens,)``."""
Encoded = tuple[np.ndarray, np.ndarray, bool]
"""Tokens of a row, int32, the flags of each, uint8, and whether the row was cut."""


def encode(
    form: Form, options: CausalOptions, tokenizer: Any, values: Sequence[Any], refuse: Refuse
) -> Iterator[Encoded]:
    """Yield the row of each value. A document may be longer than ``max_seq_len``."""
    if form == "documents":
        return _documents(values, tokenizer, options)
    return _answers(form, tokenizer, options.max_seq_len, values, refuse)


def _documents(values: Iterable[Any], tokenizer: Any, options: CausalOptions) -> Iterator[Encoded]:
    """Yield each document, with the end token where ``end_documents`` asks for it.

    Each token is predicted, except for a document's first one with ``split_documents``.
    """
    end = _end(tokenizer) if options.end_documents else []
    for tokens in token_lists(tokenizer, values, special=True):
        document = np.asarray(ended(tokens, end), np.int32)
        flags = np.full(len(document), COUNTED, np.uint8)
        if options.split_documents:
            flags[:1] = FIRST  # no target, because no token before it is visible
        yield document, flags, False


def _answers(
    form: Form, tokenizer: Any, length: int, values: Iterable[Any], refuse: Refuse
) -> Iterator[Encoded]:
    """Yield each prompt or conversation with its answers, cut to ``length``.

    ``length`` counts input tokens: a row's last target is one more. Refuses rows of whose answers
    no token is left.
    """
    if form == "messages":
        rows = _conversations(values, tokenizer, refuse)
    else:
        rows = _prompts(values, tokenizer)
    size = length + 1
    for place, (tokens, is_target) in enumerate(rows):
        if not is_target[1:size].any():
            before = f"{int(np.argmax(is_target))} tokens come before it"
            problem = f"the answer is cut off entirely: {before}; raise --max-seq-len ({length})"
            refuse(place, problem)
        flags = is_target[:size].astype(np.uint8) * np.uint8(COUNTED)
        yield tokens[:size], flags, len(tokens) > size


def _prompts(values: Iterable[Any], tokenizer: Any) -> Iterator[Targets]:
    """Yield each prompt with its completion and one end token, which are targets."""
    end = _end(tokenizer)
    for pairs in chunks(values):
        prompts, completions = zip(*pairs, strict=True)
        encoded_prompts = prompt_tokens(tokenizer, prompts)
        encoded_completions = token_lists(tokenizer, completions, special=False)
        for prompt, completion in zip(encoded_prompts, encoded_completions, strict=True):
            tokens = np.asarray([*prompt, *ended(completion, end)], np.int32)
            yield tokens, np.arange(len(tokens)) >= len(prompt)


def prompt_tokens(
    tokenizer: Any, prompts: Sequence[str], *, special: bool = True
) -> Iterator[list[int]]:
    """Yield the tokens of each prompt, without the end token that a tokenizer adds.

    ``special``: with the other special tokens that it adds. A prompt may end with an end token of
    its own, as several turns in one text do: that one stays.
    """
    [probe] = token_lists(tokenizer, ["a"], special=special)
    end = _end(tokenizer)
    adds_end = bool(end) and probe[-1:] == end
    for tokens in token_lists(tokenizer, prompts, special=special):
        has_added_end = adds_end and tokens[-1:] == end
        yield tokens[:-1] if has_added_end else tokens


def check_template(name: str, tokenizer: Any) -> None:
    """Raise ModelError, which starts with ``name``, for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise ModelError(
            f"{name}: the model's tokenizer has no chat template, so messages cannot be written; "
            "take a model that was trained on conversations, or give prompt and completion columns"
        )


def check_tokenizer(name: str, form: Form, tokenizer: Any) -> None:
    """Raise ModelError, which starts with ``name``, for one that cannot write conversations."""
    if form == "messages":
        check_template(name, tokenizer)
        if not tokenizer.is_fast:
            raise ModelError(
                f"{name}: messages need a fast tokenizer, which knows where in a text a token"
                " stands"
            )


def _conversations(values: Iterable[Any], tokenizer: Any, refuse: Refuse) -> Iterator[Targets]:
    """Yield each conversation, formatted by the chat template.

    The assistant's answers are targets.
    """
    template = ChatTemplate(tokenizer)
    for place, conversation in enumerate(values):
        try:
            answers = template.answers(conversation)
        except DataError as error:
            refuse(place, str(error))
            # In the place of a row that is passed over.
            yield np.zeros(2, np.int32), np.array([False, True])
            continue
        encoded = tokenizer(
            answers.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        begins, ends = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
        is_target = np.zeros(len(begins), bool)
        for span in answers.spans:
            # Overlap is enough, because a token may begin with the space before an answer.
            is_target |= (ends > span.begin) & (begins < span.end)
        yield np.asarray(encoded["input_ids"], np.int32), is_target


def _end(tokenizer: Any) -> list[int]:
    """Return the end token in a list, which is empty if the tokenizer has none."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
