"""The way of a row, from a source to a batch, stored or streamed: the same for every task.

A task says in a ``RowPipeline`` what its rows are. ``prepare_rows`` does the rest: it reads,
chooses, splits, encodes and caches. What it returns are ``RowDataset``: rows of a ``Table``, which
are mapped from the cache (``CachedTable``), or encoded when their step comes (``LazyTable``).

A task of a user's own imports the names in ``__all__``.
"""

from distcore_tasks.rows.pipeline import BatchInfo, Encoded, Refuse, RowPipeline, TokenizerInfo
from distcore_tasks.rows.row_task import RowTask
from distcore_tasks.rows.table import Rows
from distcore_tasks.rows.texts import TextRows
from distcore_tasks.shared.jagged import IGNORED

__all__ = [
    "IGNORED",
    "BatchInfo",
    "Encoded",
    "Refuse",
    "RowPipeline",
    "RowTask",
    "Rows",
    "TextRows",
    "TokenizerInfo",
]
