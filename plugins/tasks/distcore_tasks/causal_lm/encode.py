"""Tokenize checked rows.

Documents are joined and cut into blocks; in a conversation the answers are targets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError, ModelError
from distcore_tasks.causal_lm.conversations import ChatTemplate
from distcore_tasks.causal_lm.dataset import COUNTED, FIRST, Arrays, SequenceFiles, finish_sequences
from distcore_tasks.causal_lm.options import CausalOptions, Form
from distcore_tasks.causal_lm.rows import TextRows, texts_of
from distcore_tasks.shared.pretrained import load_tokenizer, set_pad_token
from distcore_tasks.shared.splits import Part, Refuse
from distcore_tasks.shared.tokenize_rows import chunks, ended, token_lists

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens of a row, int32, and a bool for each that is a target; both have shape ``(tokens,)``."""


def encode(
    part: Part[TextRows],
    refuse: Refuse,
    tokenizer: Any,
    options: CausalOptions,
    folder: Path,
    sources: Callable[[np.ndarray], Sequence[int]],
) -> tuple[Arrays, int, list[int]]:
    """Write the tokens of all rows into ``folder``, the new folder of a dataset.

    ``sources`` returns the first record of each source of a mixture, and the end of the last. No
    row has tokens of two sources. Returns the memory-mapped arrays, the number of rows that were
    cut to ``max_seq_len``, and the first row of each source with the end of the last. Raises
    DataError or ModelError.
    """
    if part.rows.form == "documents":
        documents = documents_of(part.values(), tokenizer, options)
        arrays, rows = _write_blocks(documents, options, folder, sources(part.numbers))
        return arrays, 0, rows
    check_tokenizer(part.rows.name, part.rows.form, tokenizer)
    answers = _answers(part.rows.form, tokenizer, options.max_seq_len, part.values(), refuse)
    arrays, rows_cut = _write_answers(answers, folder)
    return arrays, rows_cut, list(sources(part.numbers))


def encode_some(
    form: Form, options: CausalOptions, tokenizer: Any, values: Sequence[Any], refuse: Refuse
) -> Iterator[Encoded]:
    """Yield tokens and flags of each row. A document may be longer than ``max_seq_len``."""
    if form == "documents":
        for tokens in documents_of(values, tokenizer, options):
            yield tokens, np.full(len(tokens), COUNTED, np.uint8)
    else:
        for tokens, flags, _ in _answers(form, tokenizer, options.max_seq_len, values, refuse):
            yield tokens, flags


def documents_of(
    values: Iterable[Any], tokenizer: Any, options: CausalOptions
) -> Iterator[np.ndarray]:
    """Yield the tokens of each document, with the end token where ``end_documents`` asks for it."""
    end = _end(tokenizer) if options.end_documents else []
    for tokens in token_lists(tokenizer, values, special=True):
        yield np.asarray(ended(tokens, end), np.int32)


def _answers(
    form: Form, tokenizer: Any, length: int, values: Iterable[Any], refuse: Refuse
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Yield tokens and flags of each row, cut to ``length``, and True for a row that was cut.

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


def _write_blocks(
    documents: Iterator[np.ndarray], options: CausalOptions, folder: Path, sources: Sequence[int]
) -> tuple[Arrays, list[int]]:
    """Cut the stream of the documents of each source into blocks, and write them.

    Each token is predicted once, except for a stream's first one, or each document's with
    ``split_documents``. Returns the arrays, and the first block of each source with the end of the
    last.
    """
    # Number of tokens before each source.
    begins = [0]
    with SequenceFiles(folder) as files:
        for number, tokens in enumerate(documents):
            if number in sources[1:]:
                begins.append(files.count)
            flags = np.full(len(tokens), COUNTED, np.uint8)
            if options.split_documents:
                flags[:1] = FIRST  # no target, because no token before it is visible
            files.add(tokens, flags)
    starts, lengths = [], []
    first_blocks = [0]
    for begin, end in pairwise([*begins, files.count]):
        # The last token of a source is only a target.
        starts_of_source = np.arange(begin, end - 1, options.max_seq_len, dtype=np.int64)
        starts.append(starts_of_source)
        lengths.append(np.minimum(options.max_seq_len, end - 1 - starts_of_source))
        first_blocks.append(first_blocks[-1] + len(starts_of_source))
    arrays = finish_sequences(folder, np.concatenate(starts), np.concatenate(lengths))
    return arrays, first_blocks if sources else []


def _prompts(values: Iterable[Any], tokenizer: Any) -> Iterator[Encoded]:
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


def make_tokenizer(options: CausalOptions, train: Callable[[], Iterable[Any]]) -> Any:
    """Return the model's tokenizer; for a built-in model, one that is trained on values of rows."""
    if not options.from_scratch:
        return set_pad_token(load_tokenizer(options.model, options.model_folder()))
    from distcore_tasks.causal_lm.vocabulary import train_tokenizer

    return train_tokenizer(texts_of(train()), options.tokenizer.vocab_size)


def check_tokenizer(name: str, form: Form, tokenizer: Any) -> None:
    """Raise ModelError, which starts with ``name``, for one that cannot write conversations."""
    if form == "messages":
        check_template(name, tokenizer)
        if not tokenizer.is_fast:
            raise ModelError(
                f"{name}: messages need a fast tokenizer, which knows where in a text a token"
                " stands"
            )


def _conversations(values: Iterable[Any], tokenizer: Any, refuse: Refuse) -> Iterator[Encoded]:
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


def _write_answers(
    rows: Iterator[tuple[np.ndarray, np.ndarray, bool]], folder: Path
) -> tuple[Arrays, int]:
    """Write each row. Return the arrays, and the number of rows that were cut."""
    token_counts = array("q")
    rows_cut = 0
    with SequenceFiles(folder) as files:
        for tokens, flags, is_cut in rows:
            rows_cut += is_cut
            files.add(tokens, flags)
            token_counts.append(len(tokens))
    sizes = np.asarray(token_counts, np.int64)
    starts = np.cumsum(sizes) - sizes
    # The last token of a row is only a target.
    return finish_sequences(folder, starts, sizes - 1), rows_cut


def _end(tokenizer: Any) -> list[int]:
    """Return the end token in a list, which is empty if the tokenizer has none."""
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
