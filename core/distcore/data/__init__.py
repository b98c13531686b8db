"""What every task needs of data: records of files, splits, a cache on disk, arrays, random numbers by epoch and row.

A public room: what stands in ``__all__`` may be imported by any task. Begin with ``files``. Names are imported when
they are first used, so that a task's class can be imported without pyarrow and filelock.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.data.arrays import ArrayFile as ArrayFile
    from distcore.data.arrays import array_blocks as array_blocks
    from distcore.data.arrays import digest_arrays as digest_arrays
    from distcore.data.arrays import map_array as map_array
    from distcore.data.cache import cache_root as cache_root
    from distcore.data.cache import cached_folder as cached_folder
    from distcore.data.files import Record as Record
    from distcore.data.files import Source as Source
    from distcore.data.files import arrow_class_names as arrow_class_names
    from distcore.data.files import check_source as check_source
    from distcore.data.files import describe_value as describe_value
    from distcore.data.files import read_records as read_records
    from distcore.data.files import row_error as row_error
    from distcore.data.files import source_digest as source_digest
    from distcore.data.files import source_name as source_name
    from distcore.data.per_epoch import row_random as row_random
    from distcore.data.splits import Split as Split
    from distcore.data.splits import find_split as find_split

_HOME = {
    "arrays": ("ArrayFile", "array_blocks", "digest_arrays", "map_array"),
    "cache": ("cache_root", "cached_folder"),
    "files": (
        "Record", "Source", "arrow_class_names", "check_source", "describe_value", "read_records", "row_error",
        "source_digest", "source_name",
    ),
    "per_epoch": ("row_random",),
    "splits": ("Split", "find_split"),
}  # fmt: skip
_MODULES = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'distcore.data' has no attribute {name!r}")
    return getattr(import_module(f"distcore.data.{_MODULES[name]}"), name)
