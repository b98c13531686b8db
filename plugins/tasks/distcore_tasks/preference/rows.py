"""Rows of preferences: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore_data import Record
from distcore_tasks.causal_lm.encode import prompt_tokens
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.preference.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    PreparedRows,
    Refuse,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows
from distcore_tasks.rows.texts import TextRows, Texts
from distcore_tasks.shared.cache import cut_warning, side_warning
from distcore_tasks.shared.jagged import flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer, set_pad_token
from distcore_tasks.shared.tokenize_rows import ended, token_lists

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("prompt", "chosen", "rejected")
"""The three texts of a row, and its columns of tokens."""


@dataclass(frozen=True)
class PreferenceRows(TextRows):
    """Prompts with two answers, each of which ends with the end token."""

    kind: ClassVar = "preferences"
    version: ClassVar = 5
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM
    pads: ClassVar = True

    options: PairOptions
    """Options of the task."""
    is_judged: bool = False
    """True for rows that nothing is learned from: their answers may be one text."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All texts are tokens."""
        return NAMES

    @property
    def settings(self) -> Sequence[object]:
        """The length at which answers are cut."""
        return [self.options.max_seq_len]

    def check(self, record: Record) -> str | None:
        """Return the problem of a record from which nothing can be learned."""
        if problem := super().check(record):
            return problem
        _, chosen, rejected = record
        if chosen == rejected and not self.is_judged:
            return "chosen and rejected are the same text: nothing to prefer; remove the row"
        return None

    def make_tokenizer(self, train: Callable[[], Iterable[Texts]]) -> Any:
        """Return the model's tokenizer; of a built-in model one that is trained on rows."""
        options = self.options
        if not options.from_scratch:
            return set_pad_token(load_tokenizer(options.model, options.model_folder()))
        return train_tokenizer(chain.from_iterable(train()), options.tokenizer.vocab_size)

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[Texts], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of the texts. A prompt with its answer is cut to ``max_seq_len``.

        Refuses rows without any token of their answers.
        """
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        length, rows_cut = self.options.max_seq_len, 0
        tokens: dict[str, list[list[int]]] = {name: [] for name in NAMES}
        prompts, chosen_texts, rejected_texts = zip(*values, strict=True)
        encoded = zip(
            prompt_tokens(tokenizer, prompts),
            token_lists(tokenizer, chosen_texts, special=False),
            token_lists(tokenizer, rejected_texts, special=False),
            strict=True,
        )
        for row, (prompt, *answers) in enumerate(encoded):
            longest_answer = max(0, length - len(prompt))
            if not longest_answer:
                problem = f"the answers are cut off entirely: {len(prompt)} tokens come before them"
                refuse(row, f"{problem}; raise --max-seq-len ({length})")
            chosen, rejected = (ended(answer, end) for answer in answers)
            rows_cut += max(len(chosen), len(rejected)) > longest_answer
            tokens["prompt"].append(prompt)
            tokens["chosen"].append(chosen[:longest_answer])
            tokens["rejected"].append(rejected[:longest_answer])
        table = CachedTable({name: flat_rows(rows) for name, rows in tokens.items()})
        return Encoded(table, counts={"rows_cut": rows_cut})

    def length(self, rows: Rows) -> np.ndarray:
        """Return the tokens of both sequences of each row, each with the prompt."""
        prompt, chosen, rejected = map(rows.lengths, NAMES)
        lengths: np.ndarray = 2 * prompt + chosen + rejected
        return lengths

    def also_read(self, numbers: np.ndarray, count: int) -> np.ndarray | None:
        """Return the next rows, with whose chosen answers kto pairs the prompts."""
        is_mismatched = self.options.mismatched and not self.is_judged
        return (numbers + 1) % count if is_mismatched else None

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return the sequences of the rows.

        All chosen ones come first, then all rejected ones, and with the next rows the mismatched
        ones. ``input_ids``, ``attention_mask`` and ``answer``, which is 1 at tokens of the answer,
        are int64 ``(sequences, longest)``; ``rows`` are n ones.
        """
        import torch

        count = len(batch.numbers)
        prompts = rows.each("prompt")[:count]
        chosen, rejected = rows.each("chosen"), rows.each("rejected")
        mismatched = chosen[count:]
        answers = [*chosen[:count], *rejected[:count], *mismatched]

        # Each block of answers belongs to the same prompts, in the same order.
        sequence_prompts = prompts * (len(answers) // max(1, count))
        pairs = list(zip(sequence_prompts, answers, strict=True))
        shape = (len(pairs), max(len(prompt) + len(answer) for prompt, answer in pairs))
        tokens = np.full(shape, info.pad, np.int64)
        mask = np.zeros(shape, np.int64)
        is_answer = np.zeros(shape, np.int64)
        for line, (prompt, answer) in enumerate(pairs):
            begin, end = len(prompt), len(prompt) + len(answer)
            tokens[line, :begin] = prompt
            tokens[line, begin:end] = answer
            mask[line, :end] = 1
            is_answer[line, begin:end] = 1
        tables = {
            "input_ids": tokens,
            "attention_mask": mask,
            "answer": is_answer,
            "rows": np.ones(count),
        }
        return {name: torch.from_numpy(table) for name, table in tables.items()}

    def facts(
        self, name: str, table: CachedTable, train: CachedTable | None, info: TokenizerInfo
    ) -> Facts:
        """Return the number of tokens of each text."""
        return {f"{text}_tokens": len(table.jagged(text).values) for text in NAMES}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield lines about rows that are cut."""
        yield from cut_warning(facts, self.options.max_seq_len)
        yield from side_warning(facts, self.options)
