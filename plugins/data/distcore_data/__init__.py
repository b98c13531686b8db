"""Rows for the tasks of distcore: it reads data files and datasets of the hub, row by row, and
caches what a task makes of them on disk.

Any task may import the names in ``__all__``. Whoever reads this package begins with its module
``files``. pyarrow, datasets and filelock are imported when they are first used, so that a task's
class can be imported without them.
"""

from distcore_data.bad_rows import BadRows, pass_over, skipping
from distcore_data.cache import cache_root, cached_folder
from distcore_data.fetching import present
from distcore_data.files import (
    Source,
    check_source,
    data_format,
    numbered_records,
    read_records,
    source_columns,
    source_digest,
    source_name,
)
from distcore_data.filters import Filtered
from distcore_data.formats.columns import OPTIONAL_COLUMN, Record, describe_value, row_error
from distcore_data.indexes.choosing import choose_rows
from distcore_data.indexes.chosen import ChosenRows
from distcore_data.indexes.rows import IndexedRows
from distcore_data.orders import RowOrder
from distcore_data.orders.ahead import FetchedAhead
from distcore_data.orders.mixtures import MixedRows, shares_of
from distcore_data.orders.windows import WindowedRows
from distcore_data.paths import files_of
from distcore_data.splits import Split, find_split

__all__ = [
    "OPTIONAL_COLUMN",
    "BadRows",
    "ChosenRows",
    "FetchedAhead",
    "Filtered",
    "IndexedRows",
    "MixedRows",
    "Record",
    "RowOrder",
    "Source",
    "Split",
    "WindowedRows",
    "cache_root",
    "cached_folder",
    "check_source",
    "choose_rows",
    "data_format",
    "describe_value",
    "files_of",
    "find_split",
    "numbered_records",
    "pass_over",
    "present",
    "read_records",
    "row_error",
    "shares_of",
    "skipping",
    "source_columns",
    "source_digest",
    "source_name",
]
__version__ = "0.1.0"
