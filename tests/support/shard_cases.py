"""Shards for tests, made from the description of each format: tar files, MDS, chunks of
litdata and Arrow files.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

Rows = Sequence[dict[str, Any]]
LABELED = {"text": "str", "label": "int"}
"""Encodings of labeled texts."""
NOTHING: dict[str, Any] = {}


def some_of(rows: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows, ``size`` at a time; itertools has this from Python 3.12 on."""
    left = iter(rows)
    while some := tuple(islice(left, size)):
        yield some


def texts(count: int) -> list[dict[str, Any]]:
    """Return labeled texts of two classes."""
    return [{"text": f"row {number} ist grün", "label": number % 2} for number in range(count)]


def tar(path: Path, rows: Rows, form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar file. A row is its members by extension; ``__key__`` names them."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w", format=form) as file:
        for number, row in enumerate(rows):
            key = row.get("__key__", f"{number:06}")
            for extension, content in row.items():
                if extension != "__key__":
                    member = tarfile.TarInfo(f"{key}.{extension}")
                    # as webdataset: it takes a header of its own
                    member.size, member.mtime = len(content), 0.5
                    file.addfile(member, io.BytesIO(content))
    return path


def members(rows: Rows) -> list[dict[str, bytes]]:
    """Return labeled texts as members of a tar file."""
    return [{"txt": row["text"].encode(), "cls": str(row["label"]).encode()} for row in rows]


def encoded(value: object, encoding: str) -> bytes:
    if encoding in ("int", "float"):
        return struct.pack("<q" if encoding == "int" else "<d", value)
    if encoding == "json":
        return json.dumps(value).encode()
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]


def offsets(contents: Sequence[bytes], before: bytes = b"") -> bytes:
    """Return rows behind their number and offsets."""
    first = 4 + 4 * (len(contents) + 1) + len(before)
    places = accumulate(map(len, contents), initial=first)
    return (
        struct.pack(f"<{len(contents) + 2}I", len(contents), *places) + before + b"".join(contents)
    )


def need_reader() -> None:
    """Skip a test whose rows no format reads that is installed."""
    pytest.importorskip("distcore_shards")


def mds(
    folder: Path,
    rows: Rows,
    encodings: dict[str, str] = LABELED,
    per_shard: int = 3,
    compression: str | None = None,
) -> Path:
    """Write a folder as mosaicml-streaming does; ``encodings`` of the columns, by
    default of labeled texts.
    """
    need_reader()
    encodings = dict(sorted(encodings.items()))
    sizes = [8 if encoding == "int" else None for encoding in encodings.values()]
    entry = {
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": sizes,
        "format": "mds",
        "version": 2,
        "compression": compression,
        "hashes": [],
        "size_limit": 100,
    }
    folder.mkdir(parents=True)
    shards = []
    for number, some in enumerate(some_of(rows, per_shard)):
        contents = []
        for row in some:
            values = [encoded(row[name], encoding) for name, encoding in encodings.items()]
            own = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
            contents.append(struct.pack(f"<{len(own)}I", *own) + b"".join(values))
        content, name = offsets(contents, json.dumps(entry).encode()), f"shard.{number:05}.mds"
        raw, packed = {"basename": name, "bytes": len(content), "hashes": {}}, None
        if compression:
            kind = compression.partition(":")[0]
            content = pa.compress(content, codec={"gz": "gzip"}.get(kind, kind), asbytes=True)
            name = f"{name}.{kind}"
            packed = {"basename": name, "bytes": len(content), "hashes": {}}
        (folder / name).write_bytes(content)
        shards.append({**entry, "samples": len(some), "raw_data": raw, "zip_data": packed})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def litdata(
    folder: Path,
    rows: Rows,
    config: dict[str, Any] = NOTHING,
    per_chunk: int = 3,
    compression: str | None = None,
) -> Path:
    """Write a folder as litdata does: Arrow rows or, with a ``data_format``,
    values of these encodings.
    """
    need_reader()
    names = list(rows[0])
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [leaf] * len(names),
    }
    folder.mkdir(parents=True)
    chunks = []
    for number, some in enumerate(some_of(rows, per_chunk)):
        name = f"chunk-0-{number}.bin"
        if encodings := config.get("data_format"):
            contents = []
            for row in some:
                values = [
                    encoded(value, kind)
                    for value, kind in zip(row.values(), encodings, strict=True)
                ]
                contents.append(
                    struct.pack(f"<{len(values)}I", *map(len, values)) + b"".join(values)
                )
            content = offsets(contents)
        else:
            rows_of = arrow_bytes(some, indexed=True)
            header = struct.pack(
                f"<{len(some) + 2}I", len(some), *[8 + 4 * len(some)] * (len(some) + 1)
            )
            content = header + rows_of + struct.pack("<I", len(rows_of)) + b"LDARW01\0"
        chunks.append(
            {"chunk_bytes": len(content), "chunk_size": len(some), "dim": None, "filename": name}
        )
        if compression:
            chunks[-1]["filename"] = name = f"chunk-0-{number}.{compression}.bin"
            content = pa.compress(content, codec="zstd", asbytes=True)
        (folder / name).write_bytes(content)
    default = {"data_format": ["str"], "data_spec": json.dumps([1, spec]), "encryption": None}
    default |= {"item_loader": "PyTreeLoader", "compression": compression}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": default | config}))
    return folder


def arrow_bytes(rows: Rows, *, indexed: bool, per_batch: int = 2, schema: Any = None) -> bytes:
    """Return the rows in the Arrow file format or, not ``indexed``, in its stream format."""
    table, sink = pa.Table.from_pylist(list(rows), schema=schema), pa.BufferOutputStream()
    with (pa.ipc.new_file if indexed else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=per_batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def written(folder: Path, form: str, rows: Rows) -> Path:
    """Write labeled texts in one of ``FORMS`` and return what ``--data`` takes."""
    if form == "tar":
        folder.mkdir()
        for number, some in enumerate(some_of(members(rows), 3)):
            tar(
                folder / f"shard-{number:05}.tar",
                [{"__key__": f"{number}/{place}", **row} for place, row in enumerate(some)],
            )
        return folder
    if form.startswith("mds"):
        return mds(folder, rows, compression=form.partition(" ")[2] or None)
    if form.startswith("litdata"):
        kinds = {"data_format": ["str", "int"]} if form != "litdata" else NOTHING
        return litdata(folder, rows, kinds, compression="zstd" if "zstd" in form else None)
    folder.mkdir()
    (folder / "rows.arrow").write_bytes(arrow_bytes(rows, indexed=form == "arrow file"))
    return folder / "rows.arrow"


FORMS = (
    "tar",
    "mds",
    "mds zstd",
    "mds gz",
    "litdata",
    "litdata values",
    "litdata values zstd",
    "arrow file",
    "arrow stream",
)
"""Forms of the same rows."""
