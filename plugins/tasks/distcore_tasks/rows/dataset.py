"""The dataset of every task with a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from distcore import Column, ConstantColumn
from distcore_data import RowOrder
from distcore_tasks.rows.anew import Origin, entries_anew, rows_anew
from distcore_tasks.rows.blocks import StreamedBlocks, block_places, blocks_at
from distcore_tasks.rows.labels import LABELS
from distcore_tasks.rows.lazy_table import StreamedTable
from distcore_tasks.rows.origins import origins_of
from distcore_tasks.rows.pipeline import BatchInfo, BatchRows, TokenizerInfo
from distcore_tasks.rows.table import CachedTable, Rows, Table

if TYPE_CHECKING:
    from torch import Tensor


D = TypeVar("D", bound="RowDataset")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDataset:
    """Rows of a table; implements ``distcore.Dataset``."""

    pipeline: BatchRows
    """What the task says of the rows."""
    table: Table
    """The rows."""
    info: TokenizerInfo
    """What is known of the tokenizer."""
    origin: Origin | None = None
    """Values of the rows, and what encodes them; ``None`` for rows that are kept nowhere."""
    content: str = ""
    """Digest of the rows, or of all that streamed ones depend on."""
    is_training: bool = False
    """True for training rows."""
    epoch: int = 0
    """The epoch whose rows these are; always 0 for evaluation."""
    tells_targets: bool = False
    """True if batches have the positions of their targets."""
    row_order: RowOrder | None = None
    """Order of the rows in an epoch; ``None``: the core's."""
    source: str = ""
    """Name of the source in predictions; empty for rows that have no origins."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.table)

    @property
    def pads(self) -> bool | None:
        """True if rows are always padded; ``None``: as the run says."""
        return self.pipeline.pads

    @property
    def streamed(self) -> StreamedTable | None:
        """The rows, if they are read and encoded when their step comes."""
        table = self.table.rows if isinstance(self.table, StreamedBlocks) else self.table
        return table if isinstance(table, StreamedTable) else None

    @property
    def is_streamed(self) -> bool:
        """True for rows that are read and encoded when their step comes."""
        return self.streamed is not None

    @cached_property
    def lengths(self) -> Column:
        """Tokens that each row reads."""
        return self.pipeline.length_column(self.table)

    @cached_property
    def items(self) -> Column:
        """Weight of each row in the mean loss."""
        return self.pipeline.item_column(self.table, self.info)

    def with_targets(self) -> RowDataset:
        """Return the same rows, with the positions of targets in their batches."""
        return self._with_columns(replace(self, tells_targets=True))

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, int64 ``(n,)``, as the pipeline collates them."""
        return self._collated(self.table.take(self._read(indices)), indices)

    def made_anew(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices``, read and encoded again; their labels are those that are
        kept.
        """
        if self.origin is None:
            return self.batch(indices)
        wanted = self._read(indices)
        if places := block_places(self.table, wanted):
            rows = entries_anew(self.origin, int(places[1].max(initial=0)))
            blocks = blocks_at(rows, *places, self.pipeline.block_numbers)
            return self._collated(blocks.all(), indices)
        table = rows_anew(self.origin, wanted)
        kept = self.table.take(wanted)
        if LABELS in kept.table.columns and LABELS not in table.columns:
            table = CachedTable({**table.columns, LABELS: kept[LABELS]})
        return self._collated(table.all(), indices)

    def origins(self) -> Iterator[dict[str, object]]:
        """Yield the origin of each row: ``file``, ``row`` (counted from 1) and ``id``, if any."""
        return origins_of(self.table, self.pipeline, self.source)

    def _read(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows that a batch of ``indices`` reads, int64."""
        others = self.pipeline.also_read(indices, len(self))
        return indices if others is None else np.concatenate([indices, others])

    def _collated(self, rows: Rows, indices: np.ndarray) -> dict[str, Tensor]:
        batch = BatchInfo(indices, self.epoch, self.tells_targets, self.is_training)
        return self.pipeline.collate(rows, batch, self.info)

    def _with_columns(self, same: D) -> D:
        """Return a dataset of the same rows with the columns that are known already."""
        for name in ("lengths", "items"):
            if name in vars(self):
                vars(same)[name] = vars(self)[name]
        return same


@dataclass(frozen=True, kw_only=True, eq=False)
class VaryingRows(RowDataset):
    """Training rows that differ from epoch to epoch."""

    def at(self, epoch: int) -> RowDataset:
        """Return the rows as they are in ``epoch``; their lengths and items stay."""
        _ = self.lengths, self.items
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return self._with_columns(RowDataset(**(fields | {"epoch": epoch})))


@dataclass(frozen=True, kw_only=True, eq=False)
class RowsToPredict(RowDataset):
    """Rows of a file. Each is encoded by the rank that predicts it, and not for its length."""

    approximate_lengths: np.ndarray
    """About the length of each row, int64 ``(rows,)``."""
    values: list[Any]
    """The value of each row."""

    @property
    def lengths(self) -> Column:
        """About the tokens that each row reads."""
        return self.approximate_lengths

    @property
    def items(self) -> Column:
        """Ones."""
        return ConstantColumn(len(self), 1)


def row_dataset(pipeline: BatchRows, table: Table, info: TokenizerInfo) -> RowDataset:
    """Return rows of a table that are not trained on, without a digest."""
    return RowDataset(pipeline=pipeline, table=table, info=info)


def empty_rows(pipeline: BatchRows, pad: int) -> RowDataset:
    """Return a dataset without rows."""
    return row_dataset(pipeline, CachedTable({}), TokenizerInfo(pad))
