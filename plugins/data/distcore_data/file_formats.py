"""The formats of this distribution, which entry points of ``distcore.readers`` name."""

from __future__ import annotations

from pathlib import Path

from distcore_data.formats.arrow_rows import (
    arrow_columns,
    batch_rows,
    read_arrow_file,
    take_arrow,
)
from distcore_data.formats.csv_rows import csv_columns, open_csv, read_csv
from distcore_data.formats.format import FileFormat, FolderFormat
from distcore_data.formats.json_rows import json_columns, open_json_lines, read_json, read_jsonl
from distcore_data.formats.parquet_rows import (
    group_rows,
    parquet_columns,
    read_parquet,
    take_parquet,
)
from distcore_data.formats.scans import (
    scan_lines,
    scan_list,
    scan_members,
    scan_of_parts,
    scan_records,
)
from distcore_data.formats.tar_rows import read_tar
from distcore_data.formats.text_rows import (
    documents,
    has_documents,
    open_text_lines,
    read_documents,
    read_text,
)
from distcore_data.reader import digest, read

JSON_LINES = FileFormat(
    read=read,
    digest=digest,
    read_rows=read_jsonl,
    read_wanted=read_jsonl,
    scan=scan_lines,
    open_blocks=open_json_lines,
    column_names=json_columns,
)
"""A row on each line."""
JSON = FileFormat(
    read=read,
    digest=digest,
    read_rows=read_json,
    read_wanted=read_json,
    scan_file=scan_list,
    column_names=json_columns,
    is_copied=True,
)
"""One list of rows. A file with a row on each line is indexed as JSON lines."""
CSV = FileFormat(
    read=read,
    digest=digest,
    read_rows=read_csv,
    scan=scan_records,
    open_blocks=open_csv,
    column_names=csv_columns,
)
"""A header and a row for each record below it."""
TEXT = FileFormat(
    read=read, digest=digest, read_rows=read_text, scan=scan_lines, open_blocks=open_text_lines
)
"""A text on each line."""
PARQUET = FileFormat(
    read=read,
    digest=digest,
    read_rows=read_parquet,
    scan_file=scan_of_parts(group_rows),
    take=take_parquet,
    column_names=parquet_columns,
)
"""Row groups of columns."""
ARROW = FileFormat(
    read=read,
    digest=digest,
    read_rows=read_arrow_file,
    read_wanted=read_arrow_file,
    scan_file=scan_of_parts(batch_rows),
    take=take_arrow,
    column_names=arrow_columns,
)
"""Batches of columns: the file format of Arrow, or its stream format."""
TAR = FileFormat(
    read=read, digest=digest, read_rows=read_tar, read_wanted=read_tar, scan=scan_members
)
"""Members that share a key, as webdataset writes them."""


def _ones(folder: Path) -> list[int]:
    return [1] * len(documents(folder))


TEXTS_IN_FOLDERS = FolderFormat(
    name="folders of .txt",
    read=read,
    digest=digest,
    is_one=has_documents,
    read_rows=read_documents,
    files=documents,
    rows=_ones,
)
"""A text in each file; the names of folders are labels."""
