"""Rows of folders that mosaicml-streaming writes: ``index.json`` and shards of the format MDS."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import read_records, source_digest
from distcore_data.formats import (
    START,
    Columns,
    FolderFormat,
    Place,
    Record,
    RowError,
    known_columns,
    most_bytes,
    position,
    reason,
    record,
    row_error,
    tried,
    until_cut,
)
from distcore_shards.row_shards import (
    Shard,
    check_shards,
    decoders,
    read_index,
    row_values,
    shard_rows,
    using_index,
)

COMPRESSIONS = ("gz", "zstd")


def _number(form: str, content: bytes) -> object:
    return struct.unpack(f"<{form}", content)[0]


_INTEGERS = ("int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_FORMS = dict(zip((*_INTEGERS, *_FLOATS), "qbhiqBHIQefd", strict=True))
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


def read_mds(folder: Path, columns: Columns, place: Place = START) -> Iterator[Record | RowError]:
    """Yield the rows of one shard from ``place`` on."""
    entry = _entries(folder)[place.part]
    return until_cut(_read_shard(_shard(folder, entry), entry, columns, place.inner))


def mds_rows(folder: Path) -> list[int]:
    """Return the number of rows of each shard."""
    return [entry["samples"] for entry in _entries(folder)]


def _read_shard(
    shard: Shard, entry: dict[str, Any], columns: Columns, first: int
) -> Iterator[Record | RowError]:
    name, names = f"data file {shard.path}", entry["column_names"]
    wanted = {
        names[position(name, names, setting, columns)] for setting in known_columns(columns, names)
    }
    encodings = dict(zip(names, entry["column_encodings"], strict=True))
    decode = decoders(name, encodings, sorted(wanted), DECODERS)
    for number, content in enumerate(shard_rows(shard, first), first + 1):
        if isinstance(content, RowError):
            yield content
            continue
        try:
            values = zip(names, row_values(content, entry["column_sizes"]), strict=True)
            row = {column: decode[column](value) for column, value in values if column in wanted}
        except (ValueError, struct.error) as error:
            yield row_error(name, number, reason(error))
        else:
            yield tried(partial(record, name, number, row, columns))


def take_mds(
    folder: Path, file: Path, columns: Columns, shard_number: int, rows: np.ndarray
) -> list[Record] | None:
    """Return some rows of a shard, int64 ``(n,)``, each read alone; ``None`` if one
    cannot be read so.
    """
    entry = _entries(folder)[shard_number]
    shard, names, most = _shard(folder, entry), entry["column_names"], most_bytes()
    name, sizes = f"data file {shard.path}", entry["column_sizes"]
    if shard.compression:
        return None
    wanted = {
        names[position(name, names, setting, columns)] for setting in known_columns(columns, names)
    }
    decode = decoders(
        name, dict(zip(names, entry["column_encodings"], strict=True)), sorted(wanted), DECODERS
    )
    taken = list[Record]()
    try:
        with file.open("rb", buffering=0) as opened:
            for row in rows.tolist():
                start, end = struct.unpack("<II", os.pread(opened.fileno(), 8, 4 + 4 * row))
                content = os.pread(opened.fileno(), min(max(end - start, 0), most), start)
                if len(content) != end - start or start < 8 + 4 * shard.rows or end > shard.size:
                    return None
                values = zip(names, row_values(content, sizes), strict=True)
                own = {
                    column: decode[column](value) for column, value in values if column in wanted
                }
                taken.append(record(name, row + 1, own, columns))
    except (OSError, ValueError, struct.error, RowError):
        return None
    return taken


def _entries(folder: Path) -> Sequence[dict[str, Any]]:
    """Return what the index says of each shard. Raises DataError for an index
    that cannot be used.
    """
    entries: Sequence[dict[str, Any]] = read_index(folder)["shards"]
    if not entries:
        raise DataError(f"data folder {folder}: holds no rows")
    return entries


def mds_files(folder: Path) -> list[Path]:
    """Return the files of the shards. Raises DataError for an index that cannot be used."""
    entries = _entries(folder)
    with using_index(folder):
        files = [_shard(folder, entry).path for entry in entries]
    check_shards(folder, [entry["raw_data"]["basename"] for entry in entries])
    return files


def _shard(folder: Path, entry: dict[str, Any]) -> Shard:
    """Return a shard by its entry; it may lie there decompressed, too."""
    name, kind, raw, packed = (
        f"data folder {folder}",
        entry["format"],
        entry["raw_data"],
        entry["zip_data"],
    )
    if (kind, entry["version"]) != ("mds", 2):
        raise DataError(
            f"{name}: has shards of the format {kind} {entry['version']}, expected mds 2"
        )
    for key in ("column_names", "column_encodings", "column_sizes"):
        if len(entry[key]) != len(entry["column_names"]):
            raise TypeError(f"{key} has another length than column_names")
    if packed is None or (folder / raw["basename"]).is_file():
        return Shard(folder / raw["basename"], "", entry["samples"], raw["bytes"])
    compression = str(entry["compression"]).partition(":")[0]
    if compression not in COMPRESSIONS:
        known = " and ".join(COMPRESSIONS)
        raise DataError(
            f"{name}: is compressed as {compression}; {known} can be read, and decompressed shards"
        )
    return Shard(folder / packed["basename"], compression, entry["samples"], raw["bytes"])


MDS = FolderFormat(
    name="MDS",
    read=read_records,
    digest=source_digest,
    is_one=is_mds,
    read_rows=read_mds,
    files=mds_files,
    rows=mds_rows,
    has_index=True,
    take=take_mds,
)
"""The format, as the entry point ``folder.mds`` of ``distcore.readers`` names it."""
