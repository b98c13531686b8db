"""Order of the training rows, as the options ask for it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

import numpy as np

from distcore_data import RowOrder, WindowedRows
from distcore_tasks.shared.options import TaskOptions

if TYPE_CHECKING:
    from typing import Any

SHARD = 64
"""Rows of a shard: they lie side by side in the files of the cache."""


class Orderable(Protocol):
    """A dataset, as a dataclass, that may have an order of its own."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def row_order(self) -> RowOrder | None:
        """Order of the rows; ``None``: that of the core."""
        ...

    @property
    def content(self) -> str:
        """Digest of the rows."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...


D = TypeVar("D", bound=Orderable)


def in_order(rows: D, options: TaskOptions) -> D:
    """Return the training ``rows`` in the order that the options ask for. Their digest then covers it."""
    if options.order.kind == "full":
        return rows
    order = WindowedRows(
        bounds=np.append(np.arange(0, len(rows), SHARD), len(rows)), window=options.order.window_shards
    )
    content = hashlib.sha256(f"{rows.content} {order.content}".encode()).hexdigest()
    return replace(rows, row_order=order, content=content)
