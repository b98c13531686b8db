"""Rows of text classification: texts or pairs of texts, each with a label."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore import ConfigError, DataError
from distcore_data import Record
from distcore_tasks.rows.label_kind import LabelKind
from distcore_tasks.rows.labels import LABELS
from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    PreparedRows,
    Refuse,
    RowPipeline,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows, TableColumn
from distcore_tasks.shared.arrays import digest_arrays
from distcore_tasks.shared.cache import cut_warning
from distcore_tasks.shared.classification.heads import other_head
from distcore_tasks.shared.jagged import flat_of
from distcore_tasks.shared.lazy_rows import LazyValues
from distcore_tasks.shared.padding import pads_left
from distcore_tasks.shared.pretrained import (
    check_vocabulary,
    load_tokenizer,
    read_config,
    set_pad_token,
)
from distcore_tasks.shared.sources import naming, rows_name
from distcore_tasks.shared.tokenize_rows import tokenize_chunk, tokenize_pairs
from distcore_tasks.text_classification.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.text_classification.options import PAIRED, TextOptions
from distcore_tasks.text_classification.records import (
    LabeledText,
    columns_of,
    labeled_text,
    record_problem,
)

if TYPE_CHECKING:
    from torch import Tensor

TYPES = "types"
"""Column of token types; absent if the model takes none."""


@dataclass(frozen=True)
class LabeledRows(RowPipeline[LabeledText]):
    """Texts or pairs of texts with their labels; rows to predict have none."""

    kind: ClassVar = "tokens"
    version: ClassVar = 15
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM
    tells_origins: ClassVar = True

    options: TextOptions
    """Options of the task."""
    is_predicted: bool = False
    """True for rows to predict."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Return the columns by config key."""
        return self.options.used_columns.settings(labeled=not self.is_predicted)

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns of a record."""
        return columns_of(self.options.used_columns, labeled=not self.is_predicted)

    @property
    def are_pairs(self) -> bool:
        """True for two texts per row."""
        return self.options.used_columns.text_pair is not None

    @property
    def refuses(self) -> bool:
        """No row is refused once it has been read."""
        return False

    @property
    def settings(self) -> Sequence[object]:
        """What labels are, and the length at which rows are cut."""
        return [self.options.problem_type, self.options.max_seq_len]

    @property
    def streamed_settings(self) -> Sequence[object]:
        """The length alone: labels have a digest of their own."""
        return [self.options.max_seq_len]

    def check(self, record: Record) -> str | None:
        """Return the problem of the texts or the id of a record."""
        return record_problem(self.names, record)

    def value(self, record: Record) -> LabeledText:
        """Return texts, label and id."""
        return labeled_text(self.names, record)

    def size(self, value: LabeledText) -> int:
        """Return the characters of the texts."""
        return sum(map(len, value.texts))

    def row_id(self, value: LabeledText) -> int | str | None:
        """Return the id."""
        return value.id

    @property
    def label_kind(self) -> LabelKind | None:
        """Return the problem type."""
        return None if self.is_predicted else self.options.problem

    def label(self, value: LabeledText) -> object:
        """Return the label."""
        return value.label

    def make_tokenizer(self, train: Callable[[], Iterable[LabeledText]]) -> Any:
        """Load the model's tokenizer; for a built-in model, train one on the texts.

        Sets the padding token and the padding side; an exported tokenizer has them, too. Raises
        ModelError, or ConfigError if ``max_seq_len`` is too small for a pair.
        """
        options = self.options
        if options.from_scratch:
            tokenizer = self._trained_tokenizer(train())
        else:
            tokenizer = load_tokenizer(options.model, options.model_folder())
        least = tokenizer.num_special_tokens_to_add(pair=True) + 2
        if self.are_pairs and options.max_seq_len < least:
            raise ConfigError(
                f"max_seq_len = {options.max_seq_len}: a pair of texts takes at least {least}"
                " tokens"
            )
        if pads_left(options):
            # save_pretrained() writes init_kwargs
            tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
        return set_pad_token(tokenizer)

    def _trained_tokenizer(self, rows: Any) -> Any:
        """Return a tokenizer that is trained on all first texts, then on all second ones."""
        from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

        def column(place: int) -> Iterator[str]:
            return (row.texts[place] for row in rows)

        places = range(1 + self.are_pairs)
        words = LazyValues(
            lambda: chain.from_iterable(map(column, places)), len(rows) * len(places)
        )
        trained = train_wordpiece(words, self.options.tokenizer.vocab_size)
        return as_transformers(trained, pairs=self.are_pairs)

    def describe_tokenizer(self, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Return the token type of padding, and its side, which the model's folder says."""
        return {
            "type_pad": np.array(tokenizer.pad_token_type_id),
            "pads_left": np.array(pads_left(self.options)),
        }

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[LabeledText], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of each row and, if the model takes them, their types.

        Raises ModelError for a token outside the model's vocabulary.
        """
        options = self.options
        firsts = [value.texts[0] for value in values]
        if self.are_pairs:
            seconds = [value.texts[1] for value in values]
            tokens, types, lengths, cut = tokenize_pairs(
                tokenizer, firsts, seconds, options.max_seq_len
            )
        else:
            read = tokenize_chunk(tokenizer, firsts, options.max_seq_len)
            tokens, types, lengths, cut = read.values, read.types, read.lengths, read.cut
        if not options.from_scratch:
            largest = int(tokens.max(initial=0))
            check_vocabulary(options.model, options.model_folder(), largest)
        columns: dict[str, TableColumn] = {"tokens": flat_of(tokens, lengths)}
        if self.are_pairs and _takes_types(tokenizer, options):
            columns[TYPES] = flat_of(types, lengths)
        return Encoded(CachedTable(columns), counts={"rows_cut": cut})

    def content(self, table: CachedTable) -> str:
        """Return the digest of tokens, lengths, labels and token types."""
        tokens = table.flat("tokens")
        types = [table.flat(TYPES).values] if TYPES in table.columns else []
        labels = table.all()[LABELS]
        return digest_arrays(tokens.values, tokens.lengths, labels, *types, widen=True)

    def approximate_length(self, value: LabeledText) -> int | None:
        """Return the characters of the texts."""
        return self.size(value)

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return tensors, padded to the longest of the rows.

        ``input_ids``, ``attention_mask`` and, if the model takes types, ``token_type_ids`` are
        int64 ``(n, longest)``, ``labels`` ``(n, …)``.
        """
        import torch

        left = bool(info["pads_left"])
        tokens, mask = rows.padded("tokens", info.pad, left=left)
        tables = {"input_ids": tokens, "attention_mask": mask}
        if TYPES in rows.table.columns:
            tables["token_type_ids"], _ = rows.padded(TYPES, int(info["type_pad"]), left=left)
        tensors = {name: torch.from_numpy(table.astype(np.int64)) for name, table in tables.items()}
        if not self.is_predicted:
            tensors["labels"] = torch.from_numpy(rows[LABELS])
        return tensors

    def facts(self, name: str, table: CachedTable, train: Any, info: TokenizerInfo) -> Facts:
        """Return the mean length, and the number of rows of the greatest length."""
        lengths = table.flat("tokens").lengths
        return {
            "mean_tokens": round(float(lengths.mean()), 1),
            "rows_at_max_seq_len": int((lengths == self.options.max_seq_len).sum()),
        }

    @property
    def labels(self) -> tuple[int | str, ...]:
        """The labels of the classes in predictions: as in the data file, or ``class_names``.

        Raises ConfigError for names that do not fit the labels.
        """
        labels, names = tuple(self.learned["labels"]), self.options.class_names
        if names is None:
            return labels
        some = ", ".join(map(str, labels[:20])) + (", …" if len(labels) > 20 else "")
        source = rows_name(self.options.data, self.options)
        if isinstance(labels[0], str):
            raise ConfigError(
                f"class_names = {list(names)}: the labels of {source} are words already: {some}"
            )
        if len(names) != len(labels):
            raise ConfigError(
                f"class_names = {list(names)}: {len(names)} names, but {source} has {len(labels)}"
                f" classes: {some}"
            )
        return names

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for a regression."""
        return tuple(str(label) for label in self.labels)

    def facts_of_data(self) -> Facts:
        """Return the names of the classes."""
        return {"classes": list(self.classes)} if self.classes else {}

    def dataset_fields(self) -> Mapping[str, Any]:
        """Return the classes."""
        return {"classes": self.classes, "labels": self.labels}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield lines about classes, and one about rows that are cut."""
        options = self.options
        yield from other_head(self.classes, options)
        # A remark has the option, not the file: the next run may have another file with the same
        # content.
        source_of = {"data": options.data, "eval_data": next(iter(options.held_out.values()), "")}
        for option, line in self.learned["remarks"]:
            yield f"{rows_name(source_of[option], options)}: {line}"
        yield from cut_warning(facts, options.max_seq_len)


def _takes_types(tokenizer: Any, options: TextOptions) -> bool:
    """Return True if the tokenizer returns token types, and the model has
    embeddings for two types.
    """
    if "token_type_ids" not in tokenizer.model_input_names:
        return False
    return (
        options.from_scratch
        or read_config(options.model, options.model_folder()).get("type_vocab_size", 2) > 1
    )


def check_embedded(options: TextOptions) -> None:
    """Raise DataError for an embedded dataset whose rows do not fit the options."""
    for name, source in options.sources.items():
        if source in EMBEDDED:
            with naming(name):
                _check_kind(source, options)


def _check_kind(source: str, options: TextOptions) -> None:
    """Raise DataError unless the rows of an embedded dataset are those of the options."""
    if options.problem_type != "single_label":
        raise DataError(
            f"dataset {source}: has one class per row; problem_type = {options.problem_type!r}"
            " needs a file"
        )
    asks_for_pairs = options.used_columns.text_pair is not None
    if asks_for_pairs != (source in PAIRED):
        kind = "pairs of texts"
        if asks_for_pairs:
            kind = "one text per row, but columns.text_pair asks for two"
        raise DataError(f"dataset {source}: has {kind}; use it with rows of the same kind")
