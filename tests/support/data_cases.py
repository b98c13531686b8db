"""Data files for tests, one writer for every format."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

TEXTS = ['good, "very" good', "bad\u2028bad", "银色 的 高跟 鞋", "two\nlines"]


def write(path: Path, **columns: list[Any]) -> Path:
    """Write the columns to ``path`` in the format of its extension: lists in JSON,
    objects in JSON Lines.
    """
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    if path.suffix == ".json":
        path.write_text(json.dumps([list(row.values()) for row in rows]), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text(
            "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
        )
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path
