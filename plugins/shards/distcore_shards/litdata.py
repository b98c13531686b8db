"""Rows of folders that litdata writes: ``index.json`` and chunks, whose rows are
values or Arrow columns.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import read_records, source_digest
from distcore_data.formats import (
    INDEX,
    START,
    UNREADABLE,
    Columns,
    FileState,
    FolderFormat,
    Place,
    Record,
    RowError,
    arrow_records,
    broken,
    known_columns,
    near_rows,
    need_pyarrow,
    position,
    reason,
    record,
    row_error,
    state_of,
    take_arrow,
    tried,
    until_cut,
)
from distcore_shards.row_shards import (
    AGAIN,
    Shard,
    check_shards,
    decoders,
    read_index,
    row_values,
    shard_rows,
    using_index,
)
from distcore_shards.zstd_frames import LEVELS, compressed_rows

ARROW_END = b"LDARW01\0"
"""Last bytes of a chunk whose rows are an Arrow file; before them is its size, 32 bits,
the lowest byte first.
"""
DECODERS: dict[str, Callable[[bytes], object]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "int": lambda content: struct.unpack("<q", content)[0],
    "float": lambda content: struct.unpack("<d", content)[0],
    "bool": lambda content: content != b"\0",
    "bytes": bytes,
    "jpeg": bytes,
    "image": bytes,
    "file": bytes,
}
"""Functions that decode a value, by encoding; an image stays the bytes of its file."""


def is_litdata(folder: Path) -> bool:
    """Return True for a folder of chunks."""
    index = read_index(folder)
    return isinstance(index.get("chunks"), list) and isinstance(index.get("config"), dict)


def litdata_files(folder: Path) -> list[Path]:
    """Return the files of the chunks. Raises DataError for an index that cannot be used."""
    chunks, config = _opened(folder)
    with using_index(folder):
        files = [_shard(folder, chunk, config).path for chunk in chunks]
    check_shards(folder, [chunk["filename"] for chunk in chunks])
    return files


def read_litdata(
    folder: Path, columns: Columns, place: Place = START
) -> Iterator[Record | RowError]:
    """Yield the rows of one chunk from ``place`` on."""
    chunks, config = _opened(folder)
    chunk = _shard(folder, chunks[place.part], config)
    return until_cut(_read_chunk(chunk, config, columns, place.inner))


def litdata_rows(folder: Path) -> list[int]:
    """Return the number of rows of each chunk."""
    return [chunk["chunk_size"] for chunk in _opened(folder)[0]]


def take_litdata(
    folder: Path, file: Path, columns: Columns, chunk_number: int, rows: np.ndarray
) -> list[Record] | None:
    """Return some rows of a chunk in the Arrow format, int64 ``(n,)``; ``None`` for others."""
    return take_arrow(file, columns, None, rows, _in_arrow)


def _read_chunk(
    chunk: Shard, config: Mapping[str, Any], columns: Columns, first: int
) -> Iterator[Record | RowError]:
    if not chunk.compression and _ends_with_arrow(chunk.path):
        return _arrow_chunk(chunk, columns, first)
    return _chunk(chunk, config, columns, first)


def _opened(folder: Path) -> tuple[Sequence[dict[str, Any]], dict[str, Any]]:
    """Return what the index says of each chunk, and of all. Raises DataError for
    what cannot be read.
    """
    name, index = f"data folder {folder}", read_index(folder)
    with using_index(folder):
        config, chunks = index["config"], index["chunks"]
        if config.get("encryption"):
            raise DataError(
                f"{name}: is encrypted, so it cannot be read; write it without encryption"
            )
        if (loader := config.get("item_loader") or "PyTreeLoader") != "PyTreeLoader":
            raise DataError(
                f"{name}: was written for {loader}, not as rows; expected rows with columns"
                " (PyTreeLoader)"
            )
        if (level := config.get("compression_level") or "chunk") not in ("chunk", *LEVELS):
            raise DataError(f"{name}: is compressed by {level} (known: chunk, {', '.join(LEVELS)})")
    if not chunks:
        raise DataError(f"{name}: holds no rows")
    return chunks, config


def _shard(folder: Path, chunk: Mapping[str, Any], config: Mapping[str, Any]) -> Shard:
    path = folder / chunk["filename"]
    # chunk-0-0.zstd.bin
    is_packed = len(path.suffixes) > 1 and str(config.get("compression") or "").startswith("zstd")
    return Shard(path, "zstd" if is_packed else "", chunk["chunk_size"], chunk["chunk_bytes"])


def _ends_with_arrow(path: Path) -> bool:
    try:
        return _arrow_at_end(path, state_of(path))
    except FileNotFoundError:  # the reader of its values says so
        return False


@lru_cache(maxsize=1024)  # each row that is read by number asks
def _arrow_at_end(path: Path, state: FileState) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(ARROW_END)))
        return file.read() == ARROW_END


def _arrow_chunk(chunk: Shard, columns: Columns, first: int) -> Iterator[Record | RowError]:
    """Yield the rows of a memory-mapped chunk from ``first`` on."""
    name, rows = f"data file {chunk.path}", 0
    need_pyarrow(name)
    if first:
        yield from near_rows(name, chunk.path, columns, Place(inner=first), _in_arrow)
        return
    import pyarrow as pa

    try:
        with pa.memory_map(str(chunk.path)) as mapped:
            content = mapped.read_buffer()
            if len(content) != chunk.size or not _in_arrow(content):
                raise ValueError(
                    f"the chunk has {len(content)} bytes, {INDEX} says {chunk.size}; {AGAIN}"
                )
            for row in arrow_records(name, _in_arrow(content), columns):
                yield row
                rows += 1
    except (pa.ArrowException, *UNREADABLE) as error:
        raise broken(f"{name}, row {rows + 1}", error) from None
    if rows != chunk.rows:
        raise row_error(
            name, rows, f"the chunk has {rows} rows, {INDEX} says {chunk.rows}; {AGAIN}"
        )


def _in_arrow(content: Any) -> Any:
    """Return the part of a chunk in the Arrow format, whose size follows it; ``None``
    if there is none.
    """
    end = len(content) - len(ARROW_END) - 4
    if end < 0 or content[end + 4 :].to_pybytes() != ARROW_END:
        return None
    size = int.from_bytes(content[end : end + 4].to_pybytes(), "little")
    return content[end - size : end] if size <= end else None


def _chunk(
    chunk: Shard, config: Mapping[str, Any], columns: Columns, first: int
) -> Iterator[Record | RowError]:
    """Yield the rows of a chunk of values from ``first`` on: an object with columns, or a list."""
    name, kinds = f"data file {chunk.path}", config["data_format"]
    names = _names(chunk, config["data_spec"], len(kinds))
    fields = names or [str(place) for place in range(len(kinds))]
    there = known_columns(columns, fields)
    wanted = (
        fields
        if names is None
        else sorted({names[position(name, names, key, columns)] for key in there})
    )
    decode = decoders(name, dict(zip(fields, kinds, strict=True)), wanted, DECODERS)
    packed = config.get("compression_level") in LEVELS
    rows = islice(compressed_rows(chunk), first, None) if packed else shard_rows(chunk, first)
    for number, content in enumerate(rows, first + 1):
        if isinstance(content, RowError):
            yield content
            continue
        try:
            values = zip(fields, row_values(content, [None] * len(fields)), strict=True)
            row = {field: decode[field](value) for field, value in values if field in decode}
        except (ValueError, struct.error) as error:
            yield row_error(name, number, reason(error))
        else:
            yield tried(
                partial(record, name, number, list(row.values()) if names is None else row, columns)
            )


def _names(chunk: Shard, spec: str, count: int) -> list[str] | None:
    """Return the names of a row's values by the structure that PyTorch wrote; ``None`` for a
    list or a tuple.
    """
    try:
        _, tree = json.loads(spec)
        children = tree["children_spec"]
        flat = len(children) == count and all(child["type"] is None for child in children)
        if flat and tree["type"] in ("builtins.dict", "collections.OrderedDict"):
            return list(map(str, json.loads(tree["context"])))
        if flat and tree["type"] in ("builtins.list", "builtins.tuple"):
            return None
    except (KeyError, TypeError, ValueError):
        pass
    name = f"data file {chunk.path}"
    # Arrow rows that lost their end
    if not chunk.compression and (size := chunk.path.stat().st_size) < chunk.size:
        raise row_error(name, 1, f"the chunk has {size} bytes, {INDEX} says {chunk.size}; {AGAIN}")
    raise DataError(
        f"{name}: a row is neither an object of values nor a list of values; write it so"
    )


LITDATA = FolderFormat(
    name="litdata",
    read=read_records,
    digest=source_digest,
    is_one=is_litdata,
    read_rows=read_litdata,
    files=litdata_files,
    rows=litdata_rows,
    has_index=True,
    take=take_litdata,
)
"""The format, as the entry point ``folder.litdata`` of ``distcore.readers`` names it."""
