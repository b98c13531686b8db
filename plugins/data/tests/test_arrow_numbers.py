"""Values that are read where they lie in Arrow buffers are those that pyarrow
decodes, of every type.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distcore_data import IndexedRows
from distcore_data.formats import arrow_numbers, arrow_rows
from distcore_data.formats.arrow_columns import Chosen
from distcore_data.formats.arrow_numbers import NumberedBatches

COLUMN = {"columns.text": "a"}
ROWS = 40
VALUES: dict[str, Any] = {
    **{
        kind: pa.array(range(ROWS), kind)
        for kind in ("int8", "uint8", "int16", "uint32", "int64", "float", "double")
    },
    "uint64": pa.array([2**64 - 1 - row for row in range(ROWS)], "uint64"),
    "half_float": pa.array(np.arange(ROWS, dtype=np.float16)),
    "bool": pa.array([row % 3 == 0 for row in range(ROWS)]),
    **{
        kind: pa.array([f"{row} ü" * (row % 4) for row in range(ROWS)], kind)
        for kind in ("string", "large_string")
    },
    **{
        kind: pa.array([b"\xff" * (row % 4) for row in range(ROWS)], kind)
        for kind in ("binary", "large_binary")
    },
    "nulls": pa.array([None if row % 5 == 0 else f"{row}" for row in range(ROWS)]),
    "null numbers": pa.array([None if row % 5 == 0 else row for row in range(ROWS)]),
    "only nulls": pa.nulls(ROWS, "string"),
    "classes of texts": pa.array([f"{row % 3}" for row in range(ROWS)]).dictionary_encode(),
    "lists": pa.array([[row] * (row % 3) for row in range(ROWS)]),
    "objects": pa.array([{"x": row, "y": [f"{row}"]} for row in range(ROWS)]),
    "days": pa.array([datetime.date(2020, 1, 1 + row % 28) for row in range(ROWS)]),
    "cut from a longer one": pa.array([f"{row}" for row in range(ROWS + 7)]).slice(7),
    "fixed size": pa.array([b"abc"] * ROWS, pa.binary(3)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_those_that_pyarrow_decodes(kind: str, tmp_path: Path) -> None:
    batch = pa.record_batch({"other": pa.array(range(ROWS)), "a": VALUES[kind]})
    rows = np.random.default_rng(0).permutation(ROWS)
    numbered = NumberedBatches(lambda _: batch, Chosen.from_schema("a", batch.schema, COLUMN))
    taken, decoded = (
        [value for (value,) in numbered.take(np.zeros(ROWS, np.int64), rows)],
        VALUES[kind].to_pylist(),
    )
    assert taken == [decoded[row] for row in rows]
    assert [type(value) for value in taken] == [type(decoded[row]) for row in rows]
    for compression in (None, "zstd"):
        file = tmp_path / f"{compression}.arrow"
        with pa.ipc.new_file(
            file, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        ) as opened:
            opened.write(batch.slice(0, 25))
            opened.write(batch.slice(25))
        read = arrow_rows.take_arrow(file, COLUMN, np.zeros(ROWS, np.int64), rows)
        assert read == [(decoded[row],) for row in rows]


def test_names_of_classes_and_columns_inside_others() -> None:
    stored = json.dumps(
        {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    )
    columns = {
        "a": pa.array([{"b": {"c": row}} for row in range(3)]),
        "label": pa.array([1, -1, 0]),
    }
    batch = pa.record_batch(columns).replace_schema_metadata({"huggingface": stored})
    asked = {"x": "label", "y": "a.b.c", "z": "a.b.c"}
    numbered = NumberedBatches(lambda _: batch, Chosen.from_schema("a", batch.schema, asked))
    expected = [("yes", 0, 0), (None, 1, 1), ("no", 2, 2)]
    assert numbered.take(np.zeros(3, np.int64), np.arange(3)) == expected
    lost = NumberedBatches(lambda _: batch, Chosen.from_schema("a", batch.schema, {"y": "a.b.d"}))
    with pytest.raises(KeyError, match="d"):
        lost.take(np.zeros(1, np.int64), np.zeros(1, np.int64))
    out = pa.record_batch({"label": pa.array([2])}).replace_schema_metadata({"huggingface": stored})
    with pytest.raises(ValueError, match="2"):
        NumberedBatches(lambda _: out, Chosen.from_schema("a", out.schema, {"x": "label"})).take(
            *np.zeros((2, 1), np.int64)
        )


@pytest.mark.parametrize(
    ("offsets", "most"),
    [([0, 1, 5], 9), ([0, -1, 2], 9), ([0, 2, 1], 9), ([-1, 1, 2], 9), ([0, 0, 2], 1)],
)
def test_damaged_offsets_and_long_values_are_not_read_so(offsets: list[int], most: int) -> None:
    assert not arrow_numbers._are_offsets(np.array(offsets), 2, most)
    assert arrow_numbers._are_offsets(np.array([0, 1, 2]), 2, most)


def test_decompressed_batches_stay_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, size = tmp_path / "a.arrow", 2**16
    batches = [pa.record_batch({"a": [os.urandom(size // 2).hex()]}) for _ in range(8)]
    with pa.ipc.new_file(
        file, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as opened:
        for batch in batches:
            opened.write(batch)
    monkeypatch.setattr(arrow_numbers, "BYTES", 3 * size)
    arrow_numbers.forget_batches()
    before = pa.total_allocated_bytes()
    for part in (*range(8), 2):
        [(text,)] = arrow_rows.take_arrow(file, COLUMN, np.array([part]), np.array([0])) or [("",)]
        assert text == batches[part].column(0)[0].as_py()
        assert pa.total_allocated_bytes() - before < 4 * size


def test_a_removed_copy_is_no_longer_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for number in range(4):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, pa.schema({"a": pa.string()})) as opened:
            opened.write(pa.record_batch({"a": [f"{number}" * 5000]}))
        system.pipe(f"/mapped/{number}.arrow", sink.getvalue().to_pybytes())
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path))
    monkeypatch.setenv("DISTCORE_REMOTE_BYTES", "12000")
    rows = IndexedRows(Path("memory://mapped/*.arrow"), COLUMN)
    for number in range(4):
        assert rows[[number]] == [(f"{number}" * 5000,)]
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert len(mapped) <= 2, mapped
