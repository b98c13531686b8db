"""Folders of shards that cannot be used: one line with the shard and the row, and never some of
the rows in silence.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import read_records

COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS = shards.texts(8)


def refused(source: Path, columns: dict[str, str] = COLUMNS) -> str:
    """Return the line for a source that cannot be used."""
    with pytest.raises(DataError) as error:
        list(read_records(source, columns))
    assert "\n" not in str(error.value)
    return str(error.value)


def index_of(folder: Path, **changes: Any) -> Path:
    """Change the entry of the second shard."""
    index = json.loads((folder / "index.json").read_text())
    index[next(iter({"shards", "chunks"} & set(index)))][1] |= changes
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_an_index_that_says_something_else_than_its_shards_is_refused(tmp_path: Path) -> None:
    def made(name: str) -> Path:
        return shards.mds(tmp_path / name, ROWS, compression="zstd")

    raw = {"basename": "shard.00001.mds", "bytes": 99, "hashes": {}}
    size = (
        r"shard.00001.mds.zstd, row 1: the shard has \d+ bytes, index.json says 99; write or fetch"
        r" the shard again"
    )
    assert re.search(size, refused(index_of(made("size"), raw_data=raw)))
    assert "row 1: the shard has 3 rows, index.json says 4" in refused(
        index_of(made("rows"), samples=4)
    )
    entry = json.loads((made("twice") / "index.json").read_text())["shards"][0]
    assert "names the shard shard.00000.mds twice" in refused(index_of(tmp_path / "twice", **entry))
    raw["basename"] = "../shard.00001.mds"
    assert "which is not in the folder" in refused(index_of(made("out"), raw_data=raw))
    assert "has shards of the format csv 2, expected mds 2" in refused(
        index_of(made("csv"), format="csv")
    )
    assert "compressed as br; gz and zstd can be read" in refused(
        index_of(made("br"), compression="br:3")
    )
    assert "index.json cannot be used: KeyError" in refused(index_of(made("none"), raw_data={}))
    (made("lost") / "shard.00001.mds.zstd").unlink()
    assert "shard.00001.mds.zstd: no such file, but index.json names it" in refused(
        tmp_path / "lost"
    )
    chunk = shards.litdata(tmp_path / "lit", ROWS)
    assert re.search(
        r"chunk-0-1.bin, row 1: the chunk has \d+ bytes, index.json says 7",
        refused(index_of(chunk, chunk_bytes=7)),
    )


def test_a_shard_that_decompresses_to_more_than_its_offsets_say_is_refused(tmp_path: Path) -> None:
    folder = shards.mds(tmp_path / "rows", ROWS, compression="zstd")
    index = json.loads((folder / "index.json").read_text())
    size = index["shards"][1]["raw_data"]["bytes"]
    shard = folder / "shard.00001.mds.zstd"
    content = pa.decompress(shard.read_bytes(), size, codec="zstd", asbytes=True)
    shard.write_bytes(pa.compress(content + b"more", codec="zstd", asbytes=True))
    assert f"row 3: goes on after the {size} bytes that index.json says" in refused(folder)


def test_a_part_of_a_folder_of_shards_names_the_folder(tmp_path: Path) -> None:
    folder = shards.mds(tmp_path / "rows", ROWS, compression="zstd")
    for name in ("index.json", "shard.00001.mds.zstd"):
        assert f"is a part of a folder of MDS; name the folder, {folder}" in refused(folder / name)


def test_pickles_and_encodings_that_nobody_reads_are_refused_by_name(tmp_path: Path) -> None:
    rows = [{"text": "x", "label": 1, "image": b"x"}] * 3
    names = {"text": "str", "label": "int", "image": "pkl"}
    folder = shards.mds(tmp_path / "mds", rows, names)
    # a pickle that nobody asks for is passed over
    assert list(read_records(folder, COLUMNS)) == [("x", 1)] * 3
    assert "column 'image' is a pickle, which may run code" in refused(
        folder, {"columns.image": "image"}
    )
    folder = shards.mds(tmp_path / "other", rows, names | {"image": "pil"})
    assert "column 'image' has the encoding 'pil' (known: str, json, " in refused(
        folder, {"columns.image": "image"}
    )
    chunks = shards.litdata(tmp_path / "lit", rows, {"data_format": ["str", "int", "pickle"]})
    assert "column 'image' is a pickle" in refused(chunks, {"columns.image": "image"})


LITDATA: dict[str, tuple[dict[str, Any], str]] = {
    "encrypted": ({"encryption": {"algorithm": "fernet"}}, "is encrypted"),
    "tokens": ({"item_loader": "TokensLoader"}, "was written for TokensLoader, not as rows"),
    "level": ({"compression_level": "row"}, "is compressed by row (known: chunk, batch, sample)"),
    "nested": (
        {"data_format": ["str", "int"], "data_spec": "[1, {}]"},
        "a row is neither an object of values nor",
    ),
}


@pytest.mark.parametrize("case", LITDATA)
def test_chunks_that_are_not_rows_are_refused(tmp_path: Path, case: str) -> None:
    config, problem = LITDATA[case]
    assert problem in refused(shards.litdata(tmp_path / "rows", ROWS, config))


def test_a_value_that_does_not_fit_its_row_is_named(tmp_path: Path) -> None:
    folder = shards.litdata(tmp_path / "rows", ROWS, {"data_format": ["str", "int"]})
    shard = folder / "chunk-0-1.bin"
    content = bytearray(shard.read_bytes())
    start = int.from_bytes(content[8:12], "little")  # the second row
    content[start] += 1
    shard.write_bytes(content)
    assert "chunk-0-1.bin, row 2: its values have" in refused(folder)
    content[start] -= 1
    content[start + 8] = 0xFF
    shard.write_bytes(content)
    assert "chunk-0-1.bin, row 2: 'utf-8' codec can't decode" in refused(folder)
