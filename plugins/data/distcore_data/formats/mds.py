"""Rows of folders that mosaicml-streaming writes: ``index.json`` and shards of the format MDS."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from distcore import DataError
from distcore_data.formats.columns import Columns, Record, RowError, position, record, row_error, tried, until_cut
from distcore_data.formats.opening import reason
from distcore_data.formats.places import START, Place
from distcore_data.formats.row_shards import INDEX, Shard, check_shards, decoders, read_index, row_values, shard_rows

COMPRESSIONS = ("gz", "zstd")


def _number(form: str, content: bytes) -> object:
    return struct.unpack(f"<{form}", content)[0]


_FORMS = {"int": "q", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I",
          "uint64": "Q", "float16": "e", "float32": "f", "float64": "d"}  # fmt: skip
DECODERS: dict[str, Callable[[bytes], object]] = {
    "str": bytes.decode,
    "json": json.loads,
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str_int": int,
    "str_float": float,
    **{name: partial(_number, form) for name, form in _FORMS.items()},
}
"""Functions that decode a value, by encoding; an image stays the bytes of its file."""


def is_mds(folder: Path) -> bool:
    """Return True for a folder of shards."""
    shards = read_index(folder).get("shards")
    return isinstance(shards, list)


def mds_files(folder: Path) -> list[Path]:
    """Return the files of the shards. Raises DataError for an index that cannot be used."""
    return [shard.path for shard, _ in _shards(folder)]


def read_mds(folder: Path, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the rows of a folder from ``place`` on, shard by shard as its index lists them."""
    for number, (shard, entry) in enumerate(_shards(folder)[place.part :]):
        yield from until_cut(_read_shard(shard, entry, columns, 0 if number else place.inner))


def mds_rows(folder: Path) -> list[int]:
    """Return the number of rows of each shard."""
    return [shard.rows for shard, _ in _shards(folder)]


def _read_shard(shard: Shard, entry: dict[str, Any], columns: Columns, first: int) -> Iterator[Record | RowError]:
    name, names = f"data file {shard.path}", entry["column_names"]
    wanted = {names[position(name, names, setting, columns)] for setting in columns}
    encodings = dict(zip(names, entry["column_encodings"], strict=True))
    decode = decoders(name, encodings, sorted(wanted), DECODERS)
    for number, content in enumerate(shard_rows(shard, first), first + 1):
        try:
            values = zip(names, row_values(content, entry["column_sizes"]), strict=True)
            row = {column: decode[column](value) for column, value in values if column in wanted}
        except (ValueError, struct.error) as error:
            yield row_error(name, number, reason(error))
        else:
            yield tried(partial(record, name, number, row, columns))


def _shards(folder: Path) -> list[tuple[Shard, dict[str, Any]]]:
    """Return the shards with their entries in the index. A shard may lie there decompressed, too."""
    name = f"data folder {folder}"
    try:
        shards = [(_shard(folder, name, entry), entry) for entry in read_index(folder)["shards"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{name}: {INDEX} cannot be used: {type(error).__name__} {error}") from None
    check_shards(folder, [entry["raw_data"]["basename"] for _, entry in shards])
    if not shards:
        raise DataError(f"{name}: holds no rows")
    return shards


def _shard(folder: Path, name: str, entry: dict[str, Any]) -> Shard:
    kind, raw, packed = entry["format"], entry["raw_data"], entry["zip_data"]
    if (kind, entry["version"]) != ("mds", 2):
        raise DataError(f"{name}: has shards of the format {kind} {entry['version']}, expected mds 2")
    for key in ("column_names", "column_encodings", "column_sizes"):
        if len(entry[key]) != len(entry["column_names"]):
            raise TypeError(f"{key} has another length than column_names")
    if packed is None or (folder / raw["basename"]).is_file():
        return Shard(folder / raw["basename"], "", entry["samples"], raw["bytes"])
    compression = str(entry["compression"]).partition(":")[0]
    if compression not in COMPRESSIONS:
        known = " and ".join(COMPRESSIONS)
        raise DataError(f"{name}: is compressed as {compression}; {known} can be read, and decompressed shards")
    return Shard(folder / packed["basename"], compression, entry["samples"], raw["bytes"])
