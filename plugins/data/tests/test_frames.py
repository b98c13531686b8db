"""Compressed files of several frames or members: a row by number is read from its own,
and none is lost.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import IndexedRows, read_records
from distcore_data.formats import frames, opening
from distcore_data.indexes import entries

COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS: list[dict[str, Any]] = [
    {"text": f"{'grün ' * (row % 9)}{row}", "label": str(row % 3)} for row in range(400)
]
PIECE = 1500
SKIPPED = (frames.SKIPPABLE + 7).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"table"


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entries, "SETTLED", 0)


def content(folder: Path, suffix: str) -> bytes:
    if suffix == "tar":
        return shards.tar(
            folder / "whole.tar", [{"json": json.dumps(row).encode()} for row in ROWS]
        ).read_bytes()
    if suffix == "csv":
        return (
            "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in ROWS)
        ).encode()
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def pieces(whole: bytes) -> list[bytes]:
    return [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]


def zstd(piece: bytes) -> bytes:
    return bytes(pa.compress(piece, codec="zstd", asbytes=True))


def streamed(piece: bytes) -> bytes:
    """A frame that does not tell its size."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(piece)
    return bytes(sink.getvalue().to_pybytes())


PACKED: dict[str, Callable[[list[bytes]], bytes]] = {
    "zst frames": lambda some: b"".join(map(zstd, some)),
    "zst streams": lambda some: b"".join(map(streamed, some)),
    "zst seekable": lambda some: b"".join(map(zstd, some)) + SKIPPED,
    "zst pzstd": lambda some: b"".join(SKIPPED + zstd(piece) for piece in some),
    "zst empty": lambda some: zstd(b"") + b"".join(zstd(piece) + zstd(b"") for piece in some),
    "gz members": lambda some: b"".join(map(gzip.compress, some)),
    "gz bgzip": lambda some: b"".join(map(gzip.compress, some)) + gzip.compress(b""),
    "gz padded": lambda some: b"".join(gzip.compress(piece) + bytes(700) for piece in some),
    "zst one": lambda some: zstd(b"".join(some)),
    "gz one": lambda some: gzip.compress(b"".join(some)),
}


def written(folder: Path, suffix: str, form: str) -> Path:
    file = folder / f"rows.{suffix}.{form.partition(' ')[0]}"
    file.write_bytes(PACKED[form](pieces(content(folder, suffix))))
    return file


def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are decompressed and passed over, for each opened file."""
    seen, pass_over = list[int](), opening.pass_over

    def counting(file: Any, left: int) -> None:
        seen.append(left)
        pass_over(file, left)

    monkeypatch.setattr(opening, "pass_over", counting)
    return seen


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tar"])
@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("block", [100, 2**18])
def test_a_row_is_read_from_its_frame(
    suffix: str, form: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "BLOCK", block)
    source = written(tmp_path, suffix, form)
    records, rows = list(read_records(source, COLUMNS)), IndexedRows(source, COLUMNS)
    assert len(rows) == len(records) == len(ROWS)
    seen = passed(monkeypatch)
    assert [rows[[number]] for number in range(0, 400, 7)] == [[record] for record in records[::7]]
    assert (max(seen) < PIECE) == (not form.endswith("one"))


@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_a_row_at_the_first_byte_of_a_frame_is_not_the_start_of_the_file(
    suffix: str, tmp_path: Path
) -> None:
    """There a header of CSV is not expected, and a mark of the encoding is a part of the text."""
    lines = [f"\ufefftext {row}\n" for row in range(200)]
    if suffix == "csv":
        lines = ["text,label\n", *(f"text {row},x\n" for row in range(200))]
    source = tmp_path / f"rows.{suffix}.gz"
    source.write_bytes(b"".join(gzip.compress(line.encode()) for line in lines))
    records = list(read_records(source, {"columns.text": "text"}))
    assert IndexedRows(source, {"columns.text": "text"})[range(200)] == records


@pytest.mark.programs
def test_files_of_the_real_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("pzstd"):
        pytest.skip("needs pzstd, of the package zstd of the system")
    lines = b"".join(json.dumps({"text": f"{row} " * 9}).encode() + b"\n" for row in range(200_000))
    (tmp_path / "rows.jsonl").write_bytes(lines)
    subprocess.run(["pzstd", "-q", "-p", "4", tmp_path / "rows.jsonl"], check=True)
    rows = IndexedRows(tmp_path / "rows.jsonl.zst", {"columns.text": "text"})
    seen = passed(monkeypatch)
    assert rows[[199_999, 100_000]] == [("199999 " * 9,), ("100000 " * 9,)]
    assert 0 < max(seen) < len(lines) // 2


@pytest.mark.parametrize("form", ["zst frames", "gz members"])
@pytest.mark.parametrize("damage", ["cut", "cut in a header", "not one"])
def test_damage_is_one_line_as_in_a_read_from_the_start(
    form: str, damage: str, tmp_path: Path
) -> None:
    source = written(tmp_path, "jsonl", form)
    whole = source.read_bytes()
    middle = len(PACKED[form](pieces(content(tmp_path, "jsonl"))[:3]))
    source.write_bytes({
        "cut": whole[:-30],
        "cut in a header": whole[:middle] + whole[middle : middle + 7],
        "not one": whole[:middle] + b"garbage at the end",
    }[damage])  # fmt: skip
    with pytest.raises(
        DataError, match=r"rows.jsonl.(zst|gz), line \d+: cannot be read: [^\n]+$"
    ) as error:
        list(read_records(source, COLUMNS))
    with pytest.raises(DataError, match=f"^{re.escape(str(error.value))}$"):
        IndexedRows(source, COLUMNS)


def test_headers_are_walked_as_the_format_says(tmp_path: Path) -> None:
    """A frame of 300 KB has several blocks; of zeros they are repeated bytes; of
    noise they are raw.
    """
    noise = b"".join(
        zlib.crc32(number.to_bytes(4, "little")).to_bytes(4, "little") for number in range(75_000)
    )
    packed = [zstd(noise), zstd(bytes(10**6)), streamed(noise), SKIPPED, zstd(b"x"), zstd(b"")]
    (tmp_path / "a.zst").write_bytes(b"".join(packed))
    begins = [0, *(len(b"".join(packed[:frame])) for frame in (1, 2, 4, 5))]
    assert list(frames.frame_starts(tmp_path / "a.zst")) == begins
