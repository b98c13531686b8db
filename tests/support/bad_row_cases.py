"""Sources with bad rows for tests: rows that cannot be read, and shards of which one may be cut."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import shard_cases as shards

COLUMNS = {"columns.text": "text", "columns.label": "label"}


def jsonl(folder: Path) -> Path:
    rows = [
        '{"text": "a", "label": 0}',
        '{"text": "b"',
        '{"text": "c", "label": 1}',
        '{"text": "d"}',
        '["e", 0]',
    ]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def csv(folder: Path) -> Path:
    (folder / "rows.csv").write_text("text,label\na,0\nb,1,2\nc,1\nd\ne,0\n")
    return folder / "rows.csv"


def array(folder: Path) -> Path:
    (folder / "rows.json").write_text('[["a", 0], ["b"], ["c", 1], 7, ["e", 0]]')
    return folder / "rows.json"


def tar(folder: Path) -> Path:
    rows = [
        {"txt": b"a", "cls": b"0"},
        {"txt": b"b"},
        {"txt": b"c", "cls": b"1"},
        {"txt": b"\xff", "cls": b"0"},
        {"txt": b"e", "cls": b"0"},
    ]
    return shards.tar(folder / "rows.tar", rows)


LINES = {
    jsonl: ["line 2, column 13: not valid JSON", "row 4: no column 'label'"],
    csv: [
        "row 2: expected 2 values as in the header, found 3",
        "row 4: expected 2 values as in the header, found 1",
    ],
    array: ["row 2: expected [text, label] or", "row 4: expected [text, label] or"],
    tar: [
        "row 2: 000001 has no member or JSON key 'label'",
        "row 4: 000003.txt cannot be read: 'utf-8' codec can't decode",
    ],
}


SHARDS = [
    "tar",
    "tar.gz",
    "jsonl.gz",
    "jsonl.zst",
    "csv.gz",
    "parquet",
    "mds",
    "mds zstd",
    "litdata values",
    "litdata",
    "arrow stream",
    "arrow file",
]


def three_shards(folder: Path, form: str) -> tuple[Path, list[Path]]:
    """Write 2,000 rows to each of three shards; return their source, and the shards."""
    rows = [{"text": f"row {n} {n * 7919 % 104729:x}", "label": n % 2} for n in range(6000)]
    parts = [rows[start : start + 2000] for start in (0, 2000, 4000)]
    if form.startswith("mds"):
        source = shards.mds(
            folder / "rows", rows, per_shard=2000, compression=form.partition(" ")[2] or None
        )
        return source, sorted(source.glob("shard*"))
    if form.startswith("litdata"):
        kinds = {"data_format": ["str", "int"]} if form == "litdata values" else {}
        source = shards.litdata(folder / "rows", rows, kinds, per_chunk=2000)
        return source, sorted(source.glob("chunk*"))
    suffix = "arrow" if form.startswith("arrow") else form
    files = [folder / f"{number}.{suffix}" for number in range(3)]
    for file, part in zip(files, parts, strict=True):
        if form.startswith("tar"):
            shards.tar(file, shards.members(part))
        elif form == "parquet":
            pq.write_table(pa.Table.from_pylist(part), file, row_group_size=500)
        elif form.startswith("arrow"):
            file.write_bytes(shards.arrow_bytes(part, indexed=form == "arrow file", per_batch=100))
        else:
            lines = [json.dumps(row) for row in part]
            if form == "csv.gz":
                lines = ["text,label", *(f"{row['text']},{row['label']}" for row in part)]
            kind = "gzip" if file.suffix == ".gz" else "zstd"
            with pa.CompressedOutputStream(str(file), kind) as packed:
                packed.write("".join(f"{line}\n" for line in lines).encode())
    return folder, files
