"""What a task says of its rows. Whether they are stored, and their order, is none of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from distcore import Column
from distcore_data import Record, Source, describe_value
from distcore_tasks.rows.columns import column_of
from distcore_tasks.rows.label_kind import LabelKind
from distcore_tasks.rows.own_code import digest_of_code
from distcore_tasks.rows.table import CachedTable, Rows, Table, TableColumn
from distcore_tasks.shared.jagged import Flat, flat_digest, flat_rows
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.source_rows import Rows as SourceRows

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)
Refuse = Callable[[int, str], None]
"""Take the place of a value that cannot be used, and what is wrong with it. Raises DataError, or
returns if the row is passed over.
"""
Facts = dict[str, Any]
"""Facts of one dataset for the report."""


@dataclass(frozen=True, eq=False)
class TokenizerInfo:
    """What is known of a tokenizer without loading it."""

    pad: int
    """Its padding token."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What ``RowPipeline.describe_tokenizer`` returned."""

    def __getitem__(self, name: str) -> np.ndarray:
        """Return one of ``arrays``."""
        return self.arrays[name]


@dataclass(frozen=True, eq=False)
class Encoded:
    """The rows of some values."""

    table: CachedTable
    """The rows. A value that was refused may have any, or none."""
    owners: np.ndarray | None = None
    """Place of the value of each row, int64, ascending; ``None``: each value has one row."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of values that have something in common, such as those that were cut; facts."""

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Sequence[Any]],
        *,
        owners: Sequence[int] | None = None,
        **counts: int,
    ) -> Encoded:
        """Return rows by their columns.

        A column has a list of integers for each row, such as its tokens, or one number: integers
        are int64, others float32. Raises TypeError for anything else.
        """
        table = CachedTable({name: _column_of(name, values) for name, values in columns.items()})
        places = None if owners is None else np.asarray(owners, np.int64)
        return cls(table, places, counts)

    def problem(
        self, pipeline: RowPipeline[Any], values: int, vocab_size: int | None = None
    ) -> str | None:
        """Return why these cannot be the rows of so many values; ``None`` if they can.

        ``vocab_size``: tokens must be below it.
        """
        rows = values if self.owners is None else len(self.owners)
        if name := self.table.check_lengths(rows):
            return f"column {name!r} has not one entry for each of {rows} rows"
        if not isinstance(self.counts, Mapping) or not {*self.counts} <= {*pipeline.counts}:
            names = ", ".join(pipeline.counts)
            return f"counts = {self.counts!r}, expected numbers of {names}"
        for name in pipeline.tokens:
            column = self.table.columns.get(name)
            if not isinstance(column, Flat):
                what = "no column" if column is None else "one number in the column"
                return f"has {what} {name!r}, expected a list of tokens for each row"
            if vocab_size is not None and (wrong := _outside(column.values, vocab_size)):
                return f"column {name!r} has the token {wrong}, the vocabulary has {vocab_size}"
        return None


def _column_of(name: str, values: Sequence[Any]) -> TableColumn:
    """Return a column of a table. Raises TypeError for values that make none."""
    if any(isinstance(value, Sequence | np.ndarray) for value in values):
        for value in values:
            entries = np.asarray(value)
            is_integers = entries.ndim == 1 and (entries.dtype.kind in "iub" or not entries.size)
            if not is_integers or isinstance(value, str):
                shown = describe_value(value)
                raise TypeError(f"column {name!r} has a row with {shown}, expected integers")
        return flat_rows(values)
    numbers = np.asarray(values)
    if len(numbers) and numbers.dtype.kind not in "iubf":
        wrong = next(value for value in values if not isinstance(value, int | float))
        shown = describe_value(wrong)
        raise TypeError(f"column {name!r} has a row with {shown}, expected a number")
    return numbers.astype(np.float32 if numbers.dtype.kind == "f" else np.int64)


def _outside(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Return a token that no vocabulary of this size has; ``None`` without one."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    return int(wrong[0]) if len(wrong) else None


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """Where rows come up."""

    numbers: np.ndarray
    """Numbers of the rows in their dataset, int64 ``(n,)``."""
    epoch: int = 0
    """The epoch, from 0; always 0 for rows that are evaluated."""
    tells_targets: bool = False
    """True if the batch has to have the positions of its targets."""
    is_training: bool = False
    """True for training rows."""


class NamedValues(Protocol[V_co]):
    """Values of a source."""

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        ...

    def __iter__(self) -> Iterator[V_co]:
        """Yield the values in order."""
        ...


class PreparedRows(Protocol):
    """A dataset of a run, as ``prepare_rows`` makes it."""

    @property
    def info(self) -> TokenizerInfo:
        """What is known of the tokenizer."""
        ...

    @property
    def is_streamed(self) -> bool:
        """True for rows that are read and encoded when their step comes."""
        ...

    @property
    def items(self) -> Column:
        """Weight of each row in the mean loss."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...


class BatchRows(ABC):
    """What a dataset asks of the rows of a task. An instance can be pickled."""

    @property
    def pads(self) -> bool | None:
        """True if rows are always padded; ``None``: as the run says."""
        return None

    def block_numbers(self, blocks: CachedTable) -> Mapping[str, np.ndarray]:
        """Return the columns with one number per block, of blocks with the jagged columns."""
        return {}

    @abstractmethod
    def length(self, rows: Rows) -> np.ndarray:
        """Return the tokens that each row reads, int64 ``(n,)``."""

    def items(self, rows: Rows, info: TokenizerInfo) -> np.ndarray:
        """Return the weight of each row in the mean loss, int64 ``(n,)``."""
        return np.ones(len(rows), np.int64)

    def length_column(self, table: Table) -> Column:
        """Return ``length`` of each row, without encoding rows where it is known otherwise."""
        return column_of(table, self.length)

    def item_column(self, table: Table, info: TokenizerInfo) -> Column:
        """Return ``items`` of each row, without encoding rows where they are known otherwise."""
        return column_of(table, partial(self.items, info=info))

    def also_read(self, numbers: np.ndarray, count: int) -> np.ndarray | None:
        """Return the rows that a batch of the rows ``numbers``, of ``count``, reads in addition.

        ``None``: none.
        """
        return None

    @abstractmethod
    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return a batch. ``rows`` are those asked for, then those of ``also_read``."""


@dataclass(frozen=True)
class RowPipeline(BatchRows, Generic[V]):
    """The rows of a task, from its sources to its batches. A subclass is a frozen dataclass.

    ``V`` is a value: what is encoded of one record.
    """

    kind: ClassVar[str]
    """Name of the rows' folder in the cache."""
    version: ClassVar[int] = 1
    """Raise it when the same options and sources give other rows, or other files."""
    embedded: ClassVar[Mapping[str, Callable[[], SourceRows[Any]]]] = {}
    """The functions that return the values of embedded datasets, by name."""
    made_from: ClassVar[tuple[object, ...]] = ()
    """Everything that embedded values depend on, except for the Python version."""
    counts: ClassVar[tuple[str, ...]] = ("rows_cut",)
    """Names of the facts that ``encode`` counts."""
    varies: ClassVar[bool] = False
    """True if training rows differ from epoch to epoch."""
    tells_origins: ClassVar[bool] = False
    """True if predictions have the file, the row there and the id of each row."""

    options: Any
    """Options of the task."""
    learned: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """What ``learn`` and ``notes`` returned; empty before."""

    @property
    def unit(self) -> str:
        """What a source has, in facts: rows or texts."""
        return "rows"

    @property
    def refuses(self) -> bool:
        """False if ``encode`` refuses no value."""
        return True

    @property
    def block(self) -> int | None:
        """Most entries that a block reads; ``None``: each value has rows of its own.

        Otherwise the rows of all values are joined and cut into blocks, which are the rows then. A
        block has one entry more than it reads, with which the next block begins. Training rows of a
        stream stay as they are.
        """
        return None

    @property
    def tokens(self) -> tuple[str, ...]:
        """The columns with tokens of the vocabulary; their digest is that of the rows."""
        return ("tokens",)

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, str]:
        """The columns of a source that are read, by config key."""

    @property
    @abstractmethod
    def settings(self) -> Sequence[object]:
        """All options on which stored rows depend, but for columns and tokenizer."""

    @property
    def streamed_settings(self) -> Sequence[object]:
        """The options on which streamed rows depend: their digest is part of a checkpoint."""
        return self.settings

    def resolved(self) -> Self:
        """Return the same pipeline, which knows what decides how its sources are read.

        It is called before anything else is read for a new cache entry. Raises DataError.
        """
        return self

    def check_source(self, source: Source) -> None:
        """Raise DataError for a source whose format cannot hold these rows."""
        return

    @property
    def code(self) -> list[str]:
        """A digest of the code on which rows depend: those of a user's pipeline are made anew when
        it has changed. Empty for pipelines of this distribution, which have a ``version``.
        """
        digest = digest_of_code(type(self))
        return [] if digest is None else [digest]

    @abstractmethod
    def check(self, record: Record) -> str | None:
        """Return what is wrong with a record; ``None`` for one that can be used."""

    def checker(self) -> Callable[[Record], str | None]:
        """Return what checks the records of one source; it may compare them with each other."""
        return self.check

    @abstractmethod
    def value(self, record: Record) -> V:
        """Return what is encoded of a record that can be used."""

    def size(self, value: V) -> int:
        """Return how many characters, or words, have to be encoded for a value."""
        parts: Any = value
        return sum(map(len, parts))

    def row_id(self, value: V) -> int | str | None:
        """Return the user's id of a row; ``None`` without a column of ids."""
        return None

    @property
    def label_kind(self) -> LabelKind | None:
        """Return what the labels of rows are; ``None`` for rows without labels.

        Labels are encoded before all else, and a column of each batch's rows. ``learned`` then has
        ``labels`` and ``remarks``, and ``learn`` is not called.
        """
        return None

    def label(self, value: V) -> object:
        """Return the label of a value, of rows with labels."""
        raise NotImplementedError

    def learn(self, name: str, values: Iterable[V]) -> Mapping[str, Any]:
        """Return what the task has to know of all rows of ``data`` before any is encoded.

        These are JSON values, such as the names of classes, which are stored with the rows.
        ``values``: those of all rows, before the split. Raises DataError, whose message begins with
        ``name``, for rows that cannot be used as a whole.
        """
        return {}

    def knowing(self, learned: Mapping[str, Any]) -> Self:
        """Return the same pipeline, which knows what ``learn`` returned."""
        return replace(self, learned=learned)

    def notes(self, tokenizer: Any, sources: Sequence[NamedValues[V]]) -> Mapping[str, Any]:
        """Return what else is kept of all rows, once there is a tokenizer, as JSON values.

        ``sources``: the values of that of each dataset, training rows first.
        """
        return {}

    @abstractmethod
    def make_tokenizer(self, train: Callable[[], Iterable[V]]) -> Any:
        """Return the tokenizer, which may be trained on the values that ``train`` returns.

        These are training values only: a vocabulary must not see the evaluation rows.
        """

    def load_tokenizer(self, name: str, folder: Path) -> Any:
        """Load the saved tokenizer of the model ``name`` from a folder."""
        return load_tokenizer(name, folder)

    def describe_tokenizer(self, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Return what encoding and batches need to know of the tokenizer; it is stored."""
        return {}

    @abstractmethod
    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[V], refuse: Refuse
    ) -> Encoded:
        """Return the rows of some values, one or more.

        A value must have the same rows whatever other values come with it: stored rows are encoded
        in chunks of thousands, streamed ones in those of a step.
        """

    def content(self, table: CachedTable) -> str:
        """Return the digest of stored rows, which a checkpoint knows them by."""
        return flat_digest(*map(table.flat, self.tokens))

    def length(self, rows: Rows) -> np.ndarray:
        """Return the tokens that each row reads, int64 ``(n,)``."""
        return rows.lengths(self.tokens[0])

    def approximate_length(self, value: V) -> int | None:
        """Return about how long a row to predict is, without encoding it.

        ``None``: all rows to predict are encoded at once.
        """
        return None

    def baseline(self, train: CachedTable) -> Any:
        """Return what ``facts`` has to know of the stored training rows; found once."""
        return train

    def facts(self, name: str, table: CachedTable, train: Any, info: TokenizerInfo) -> Facts:
        """Return facts of a stored dataset; they are stored with it.

        ``train``: the ``baseline``; ``None`` if training rows are streamed. Raises DataError, whose
        message begins with ``name``, for rows that cannot be used as a whole.
        """
        return {}

    def facts_of_blocks(self, entries: int) -> Facts:
        """Return facts of blocks of a stream, which read so many entries."""
        return {}

    def facts_of_data(self) -> Facts:
        """Return facts of all datasets together."""
        return {}

    def dataset_fields(self) -> Mapping[str, Any]:
        """Return the fields of the run's datasets that depend on what was learned."""
        return {}

    def facts_of_run(self, rows: PreparedRows) -> Facts:
        """Return facts of a dataset that depend on options on which its rows do not."""
        return {}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield warnings about datasets, by name, with their facts."""
        yield from ()
