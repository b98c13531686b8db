"""Rows of token classification: words, of which each has a tag.

The first token of a word has its class; other tokens have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore import DataError
from distcore_data import Record, Source, data_format, source_name
from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    PreparedRows,
    Refuse,
    RowPipeline,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows, TableColumn, text_column
from distcore_tasks.shared.cache import total
from distcore_tasks.shared.classification.heads import in_order_of_head, other_head
from distcore_tasks.shared.jagged import IGNORED, Flat, flat_digest
from distcore_tasks.shared.lazy_rows import LazyValues
from distcore_tasks.shared.pretrained import check_vocabulary
from distcore_tasks.token_classification.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.token_classification.metrics import Lookup, is_iob
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.tags import (
    Tag,
    TagChecker,
    TaggedWords,
    distinct_tags,
    tag_numbers,
    tagged_words,
    words_problem,
)
from distcore_tasks.token_classification.words import Words, load_words_tokenizer, tokenize_words

if TYPE_CHECKING:
    from torch import Tensor

TAGGED = "tagged"
"""Column with the words of a row and the numbers of their tags as JSON, for baselines."""


@dataclass(frozen=True)
class TaggedRows(RowPipeline[TaggedWords]):
    """Words and their tags; those of rows to predict have no tags."""

    kind: ClassVar = "tagged"
    version: ClassVar = 4
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM
    counts: ClassVar = ("words", "words_cut")
    tells_origins: ClassVar = True

    options: TagOptions
    """Options of the task."""
    is_predicted: bool = False
    """True for rows to predict, whose only column is that of words."""

    @property
    def tags(self) -> tuple[Tag, ...]:
        """The tags as in the data file, in the order of class numbers."""
        return tuple(self.learned.get("tags", ()))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the tags."""
        return tuple(map(str, self.tags))

    @property
    def columns(self) -> Mapping[str, str]:
        """Return the columns by config key."""
        columns = self.options.columns
        asked = {"columns.tokens": columns.tokens}
        if not self.is_predicted:
            asked["columns.tags"] = columns.tags
            if columns.id:
                asked["columns.id"] = columns.id
        return asked

    @property
    def settings(self) -> Sequence[object]:
        """The length at which rows are cut."""
        return [self.options.max_seq_len]

    @property
    def streamed_settings(self) -> Sequence[object]:
        """Also the classes."""
        return [self.options.max_seq_len, *self.classes]

    def check_source(self, source: Source) -> None:
        """Raise DataError for a CSV file."""
        if data_format(source) == ".csv":
            raise DataError(
                f"{source_name(source)}: CSV has no lists, which words and tags are; use .json,"
                " .jsonl or .parquet"
            )

    def check(self, record: Record) -> str | None:
        """Return the problem of the words of a record without tags."""
        return words_problem(record[0])

    def checker(self) -> Callable[[Record], str | None]:
        """Return what checks the records of one source, whose tags are of one type."""
        return self.check if self.is_predicted else TagChecker()

    def value(self, record: Record) -> TaggedWords:
        """Return words, tags and id."""
        return tagged_words(record)

    def size(self, value: TaggedWords) -> int:
        """Return the number of words and tags."""
        return len(value.words) + len(value.tags)

    def row_id(self, value: TaggedWords) -> int | str | None:
        """Return the id."""
        return value.id

    def learn(self, name: str, values: Iterable[TaggedWords]) -> Mapping[str, Any]:
        """Return the tags in the order of class numbers."""
        return {"tags": in_order_of_head(distinct_tags(name, values), self.options)}

    def make_tokenizer(self, train: Callable[[], Iterable[TaggedWords]]) -> Any:
        """Return the model's tokenizer; of a built-in model one that is trained on rows."""
        options = self.options
        if not options.from_scratch:
            return self.load_tokenizer(options.model, options.model_folder())
        from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

        rows: Any = train()
        texts = LazyValues(lambda: (" ".join(row.words) for row in rows), len(rows))
        return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))

    def load_tokenizer(self, name: str, folder: Path) -> Any:
        """Load a tokenizer that marks the starts of words."""
        return load_words_tokenizer(name, folder)

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[TaggedWords], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of each row, where its words begin, and their classes.

        Refuses rows with a tag that is no class, and rows of which no word is left. Raises
        ModelError for a token outside the model's vocabulary.
        """
        numbers = [] if self.is_predicted else tag_numbers(values, self.classes, refuse)
        words = tokenize_words(tokenizer, [row.words for row in values], self.options.max_seq_len)
        columns: dict[str, TableColumn] = {
            "tokens": words.tokens,
            "begins": words.begins,
            "words": words.count,
        }
        if self.is_predicted:
            return Encoded(CachedTable(columns))
        judged = words.count_judged()
        self._check_judged(words, judged, refuse)
        columns |= {"judged": judged, "labels": _token_labels(words, numbers)}
        pairs = zip(values, numbers, strict=True)
        columns[TAGGED] = text_column([json.dumps((row.words, tags)) for row, tags in pairs])
        counts = {"words": int(words.count.sum()), "words_cut": int((words.count - judged).sum())}
        return Encoded(CachedTable(columns), counts=counts)

    def _check_judged(self, words: Words, judged: np.ndarray, refuse: Refuse) -> None:
        """Refuse rows without a word that has a token, of which each has ``judged``."""
        options = self.options
        for empty in np.flatnonzero(judged == 0).tolist():
            remedy = f"raise --max-seq-len ({options.max_seq_len}), or remove the row"
            refuse(empty, f"no word of it is left: {remedy}")
        if not options.from_scratch:
            largest = int(words.tokens.values.max(initial=0))
            check_vocabulary(options.model, options.model_folder(), largest)

    def content(self, table: CachedTable) -> str:
        """Return the digest of tokens, starts of words and classes."""
        return flat_digest(*map(table.flat, ("tokens", "begins", "labels")))

    def approximate_length(self, value: TaggedWords) -> int | None:
        """Return the number of words."""
        return len(value.words)

    def items(self, rows: Rows, info: TokenizerInfo) -> np.ndarray:
        """Return the words of each row that have a token."""
        return rows["judged"]

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return int64 tensors, padded to the longest of the rows.

        ``input_ids``, ``attention_mask``, ``begins`` and ``labels`` are ``(n, longest)``, ``words``
        is ``(n,)``. ``begins`` has the number of a word at its first token, from 0, and ``IGNORED``
        at others. Rows to predict have no ``labels``.
        """
        import torch

        tokens, mask = rows.padded("tokens", info.pad)
        begins, _ = rows.padded("begins", IGNORED)
        arrays = {"input_ids": tokens, "attention_mask": mask, "begins": begins}
        arrays["words"] = rows["words"]
        if not self.is_predicted:
            arrays["labels"], _ = rows.padded("labels", IGNORED)
        return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}

    def baseline(self, train: CachedTable) -> tuple[CachedTable, Lookup]:
        """Return the training rows, and the most frequent tag of each of their words."""
        return train, Lookup(self._tagged_words(train))

    def facts(self, name: str, table: CachedTable, train: Any, info: TokenizerInfo) -> Facts:
        """Return the number of tokens; of held-out rows also the scores of the baseline."""
        facts: Facts = {"tokens": len(table.jagged("tokens").values)}
        if train is None:  # nobody knows the tags of words in training
            return facts
        trained_on, lookup = train
        if table is not trained_on:
            facts |= lookup.facts(self._tagged_words(table), self.classes)
        return facts

    def _tagged_words(self, table: CachedTable) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the words of each row with the names of their tags."""
        classes, column = self.classes, table.jagged(TAGGED)
        for row in range(len(table)):
            words, tags = json.loads(column.row(row).tobytes())
            yield words, [classes[tag] for tag in tags]

    def facts_of_data(self) -> Facts:
        """Return the tags, and whether they are in IOB form."""
        return {"tags": list(self.classes), "iob": is_iob(self.classes)}

    def dataset_fields(self) -> Mapping[str, Any]:
        """Return the classes."""
        return {"classes": self.classes, "labels": self.tags}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield a line about a head of other classes, and one about words that are cut."""
        yield from other_head(self.classes, self.options)
        cut = total(facts, "words_cut")
        if cut:
            length = self.options.max_seq_len
            where = f"stand behind the {length} tokens of their row, or have none"
            learned = "they are neither learned nor judged; --max-seq-len sets another length"
            yield f"{cut} of {total(facts, 'words')} words {where}: {learned}"


def _token_labels(words: Words, numbers: Sequence[list[int]]) -> Flat:
    """Return the class of each first token of a word, ``IGNORED`` for others.

    ``numbers``: the classes of all words of each row.
    """
    every = np.concatenate([np.asarray(row, np.int32) for row in numbers])
    starts = np.cumsum(words.count) - words.count
    word = words.begins.values + np.repeat(starts, words.begins.lengths)
    labels = np.where(words.begins.values >= 0, every[np.maximum(word, 0)], np.int32(IGNORED))
    return Flat(labels, words.begins.offsets)
