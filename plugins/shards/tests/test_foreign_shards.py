"""Files that webdataset, mosaicml-streaming, litdata and datasets really write are
read, row by row.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import foreign_shards
import pyarrow as pa
import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import IndexedRows, check_source, data_format, read_records

COLUMNS = {"columns.text": "text", "columns.label": "label"}
ROWS = shards.texts(8)
RECORDS = [(row["text"], row["label"]) for row in ROWS]
FORMATS = {"webdataset": ".tar", "mds": "MDS", "litdata": "litdata"}
FORMS = (
    "webdataset",
    "webdataset gz",
    "mds",
    "mds zstd",
    "mds zstd:7",
    "mds gz",
    "litdata",
    "litdata zstd",
    "litdata list",
    "litdata list chunk",
    "litdata list batch",
    "litdata list sample",
    "litdata jpeg",
    "litdata jpeg chunk",
    "litdata jpeg batch",
    "litdata jpeg sample",
)
"""Formats with their compression. litdata writes Arrow columns, lists of values, or
values with their names.
"""


@pytest.fixture(scope="module")
def shards_of_others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_shards.write(tmp_path_factory.mktemp("others"), ROWS, *FORMS)


@pytest.mark.programs
@pytest.mark.parametrize("form", FORMS)
def test_shards_that_another_package_wrote_are_read(
    shards_of_others: Path, tmp_path: Path, form: str
) -> None:
    source = foreign_shards.written(shards_of_others, form)
    check_source(source)
    assert data_format(source) == FORMATS[form.partition(" ")[0]]
    assert list(read_records(source, COLUMNS)) == RECORDS
    assert IndexedRows(source, COLUMNS)[[6, 0, 3]] == [RECORDS[6], RECORDS[0], RECORDS[3]]
    cut = shutil.copytree(source, tmp_path / "cut")
    files = sorted(file for file in cut.iterdir() if file.name != "index.json")
    assert len(files) > 1
    files[1].write_bytes(files[1].read_bytes()[: files[1].stat().st_size // 3])
    with pytest.raises(DataError, match=rf"{files[1].name}(, row \d|: cannot be read)"):
        list(read_records(cut, COLUMNS))


def test_a_folder_that_datasets_wrote_is_read_file_by_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="needs the package datasets: pip install datasets"
    )
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"])
    )
    datasets.Dataset.from_list(ROWS, features=features).save_to_disk(
        tmp_path / "rows", num_shards=2
    )
    named = [(text, ("no", "yes")[label]) for text, label in RECORDS]
    assert list(read_records(tmp_path / "rows/*.arrow", COLUMNS)) == named
    with datasets.arrow_writer.ArrowWriter(
        path=str(tmp_path / "a.arrow"), writer_batch_size=2
    ) as writer:
        for row in ROWS:
            writer.write(row)
        writer.finalize()
    assert list(read_records(tmp_path / "a.arrow", COLUMNS)) == RECORDS
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file,
        pa.ipc.new_file(file, pa.table({"text": ["x"]}).schema) as b,
    ):
        b.write_table(pa.table({"text": ["x"]}))
    assert list(read_records(tmp_path / "b.arrow", {"columns.text": "text"})) == [("x",)]
