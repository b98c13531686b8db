"""Order of the training rows, as the options ask for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import truediv
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import numpy as np

from distcore import Column, DataError
from distcore_data import MixedRows, RowOrder, WindowedRows, shares_of
from distcore_tasks.shared.mixtures import weights_by_step
from distcore_tasks.shared.options import Order, TaskOptions
from distcore_tasks.shared.streams.datasets import streamed_rows

if TYPE_CHECKING:
    from typing import Any

    from distcore import RunConfig

SHARD = 64
"""Rows of a shard: they lie side by side in the files of the cache."""
PIECE = 1024
"""Most rows of a shard of a stream, which is a part of a file, or a whole remote one."""


class Orderable(Protocol):
    """A dataset, as a dataclass, that may have an order of its own."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def row_order(self) -> RowOrder | None:
        """Order of the rows; ``None``: that of the core."""
        ...

    @property
    def lengths(self) -> Column:
        """Tokens of each row."""
        ...

    @property
    def content(self) -> str:
        """Digest of the rows."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...


D = TypeVar("D", bound=Orderable)


def in_order(
    rows: D,
    options: TaskOptions,
    config: RunConfig,
    sources: Sequence[int] = (),
    sizes: Sequence[float] = (),
) -> D:
    """Return the training ``rows`` in the order that the options ask for. Their
    digest then covers it.

    ``sources``: the first row of each source of a mixture, and the end of the last. ``sizes``: mean
    length of the rows of each, if that is known already.
    """
    streamed = streamed_rows(rows)
    if streamed is not None and options.order.kind == "full":
        streamed.check_room()
    order = _order(rows, options, config.global_batch_size, sources, sizes)
    if order is None:
        return rows
    if streamed is not None and options.order.kind == "windows":
        order = streamed.fetched_ahead(order, SHARD * options.order.window_shards)
    content = hashlib.sha256(f"{rows.content} {order.content}".encode()).hexdigest()
    return replace(rows, row_order=order, content=content)


def _order(
    rows: Orderable,
    options: TaskOptions,
    global_batch: int,
    sources: Sequence[int],
    sizes: Sequence[float],
) -> RowOrder | None:
    asked, weights = options.order, weights_by_step(options)
    streamed = streamed_rows(rows)
    pieces = streamed.pieces(PIECE) if streamed is not None and asked.kind == "windows" else None
    if not weights:
        return _shuffled(asked, pieces, 0, len(rows)) if asked.kind == "windows" else None
    bounds = list(pairwise(sources))
    for source, (start, stop) in zip(weights[0], bounds, strict=True):
        if start == stop:
            raise DataError(
                f"data {source}: no row of it is left for training; give it more rows, or"
                " --eval-data a file"
            )
    if asked.mix_by == "rows":
        sizes = [1.0] * len(bounds)
    elif not sizes:
        sizes = [
            max(1.0, float(rows.lengths[np.arange(start, stop)].mean())) for start, stop in bounds
        ]
    first, *later = (
        (
            _first_position(step, len(rows), global_batch),
            shares_of([*map(truediv, by_source.values(), sizes)]),
        )
        for step, by_source in weights.items()
    )
    shuffled = (_shuffled(asked, pieces, *pair, key) for key, pair in enumerate(bounds))
    return MixedRows(sources=tuple(shuffled), shares=first[1], later=tuple(later))


def _first_position(step: int, rows: int, global_batch: int) -> int:
    """Return the number of positions before a step, counted from 0: the last step of an
    epoch may have fewer.
    """
    epochs, inside = divmod(step, -(-rows // global_batch))
    return epochs * rows + inside * global_batch


def _shuffled(
    asked: Order, pieces: np.ndarray | None, start: int, stop: int, key: int = 0
) -> WindowedRows:
    """Return the order of some rows. ``pieces``: the bounds of what is read together, of
    rows that are streamed.
    """
    if asked.kind == "full":
        return WindowedRows(bounds=np.array([start, stop]), window=1, key=key)
    if pieces is None:
        return WindowedRows.even(start, stop, SHARD, asked.window_shards, key)
    bounds = np.unique(pieces.clip(start, stop))
    window = round(asked.window_shards * SHARD * (len(bounds) - 1) / (stop - start))
    return WindowedRows(bounds=bounds, window=max(1, window), key=key)
