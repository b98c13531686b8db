"""Images in shards and in several files: the same rows as a folder of images, also to predict."""

from __future__ import annotations

import json
from pathlib import Path

import foreign_shards
import numpy as np
import pytest
import shard_cases as shards
from image_cases import CLASSES, encoded, in_folders, in_parquet, pixels

from distcore import DataError, RunConfig
from distcore.cli.main import main
from distcore_tasks.image_classification.options import Columns
from distcore_tasks.image_classification.prepare import ImageDatasets
from distcore_tasks.image_classification.sources import open_source
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.shared.options import Filter

BY_CLASS = [row for start in (0, 1) for row in range(start, 12, 2)]
"""The rows in the order of a folder's listing."""
FORMS = ["tar", "mds", "litdata", "litdata values", "arrow"]


def prepared(data: Path) -> ImageDatasets:
    datasets = ImageClassification(data=str(data), image_size=12, eval_fraction=0.25).prepare(
        RunConfig()
    )
    assert isinstance(datasets, ImageDatasets)
    return datasets


def written(path: Path, form: str) -> Path:
    """Write the 12 images, in the order of a folder's listing, in this form."""
    rows = [{"image": encoded(pixels(row)), "label": CLASSES[row % 2]} for row in BY_CLASS]
    if form == "mds":
        return shards.mds(path / form, rows, {"image": "png", "label": "str"})
    if form.startswith("litdata"):
        return shards.litdata(
            path / form, rows, {"data_format": ["image:png", "str"]} if form != "litdata" else {}
        )
    (path / form).mkdir()
    if form == "arrow":
        (path / "arrow/a.arrow").write_bytes(shards.arrow_bytes(rows, indexed=False))
        return path / form
    for number, some in enumerate(shards.some_of(rows, 5)):
        members = [{"png": row["image"], "cls": row["label"].encode()} for row in some]
        shards.tar(path / form / f"{number}.tar", members)
    return path / form


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images_and_classes(tmp_path: Path, form: str) -> None:
    data, expected = (
        prepared(written(tmp_path, form)),
        prepared(in_folders(tmp_path / "photos", 12)),
    )
    assert data.labels == data.classes == CLASSES
    # of Identified
    assert data.train.content == expected.train.content  # type: ignore[attr-defined]
    rows = np.arange(len(expected.train))
    one, other = data.train.batch(rows), expected.train.batch(rows)
    assert all(bool((one[name] == other[name]).all()) for name in ("pixel_values", "labels"))


@pytest.mark.programs
def test_images_that_other_packages_wrote_are_those_of_the_folder(tmp_path: Path) -> None:
    photos = in_folders(tmp_path / "photos", 12)
    images = [
        {"image": str(photos / f"{CLASSES[row % 2]}/{row:02}.png"), "label": CLASSES[row % 2]}
        for row in BY_CLASS
    ]
    forms = ("webdataset", "mds", "mds zstd", "litdata")
    others, expected = foreign_shards.write(tmp_path / "others", images, *forms), prepared(photos)
    rows = np.arange(len(expected.train))
    for form in forms:
        data = prepared(foreign_shards.written(others, form))
        assert data.labels == CLASSES
        one, other = data.train.batch(rows), expected.train.batch(rows)
        assert all(bool((one[name] == other[name]).all()) for name in ("pixel_values", "labels")), (
            form
        )


def test_several_parquet_files_that_name_the_same_classes_are_mapped_by_name(
    tmp_path: Path,
) -> None:
    images = [encoded(pixels(row)) for row in range(6)]
    (tmp_path / "rows").mkdir()
    for number in range(2):
        in_parquet(
            tmp_path / f"rows/{number}.parquet", images, [row % 2 for row in range(6)], CLASSES
        )
    data = prepared(tmp_path / "rows/*.parquet")
    assert (len(data.train), data.classes) == (9, CLASSES)
    in_parquet(tmp_path / "rows/2.parquet", images, [0] * 6, CLASSES[::-1])
    images_of = open_source(str(tmp_path / "rows"), Columns())
    assert list(images_of.labels) == [*CLASSES * 6, *("red",) * 6], "0 is red in the last file"
    in_parquet(tmp_path / "rows/3.parquet", images, [0] * 6)
    with pytest.raises(
        DataError,
        match=r"3.parquet, row 1: label is an integer \(0\), but .* use one type throughout",
    ):
        prepared(tmp_path / "rows")


def test_rows_of_shards_are_kept_by_a_filter(tmp_path: Path) -> None:
    assert len(open_source(str(written(tmp_path, "tar")), Columns(), Filter("label", "red"))) == 6


def test_a_folder_with_folders_has_images_by_class_whatever_lies_beside_them(
    tmp_path: Path,
) -> None:
    photos = in_folders(tmp_path / "photos", 12)
    (photos / "photos.tar").write_bytes(b"the archive they came in")
    assert len(prepared(photos).train) == 9


@pytest.mark.programs
def test_a_run_learns_from_tar_files_and_predicts_rows_of_them_by_key(tmp_path: Path) -> None:
    source, out, rows = written(tmp_path, "tar"), tmp_path / "run", tmp_path / "rows.jsonl"
    config = tmp_path / "job.yaml"
    config.write_text(
        f"task: image-classification\ndata: {source}\nout: {out}\nmax_steps:"
        " 2\nglobal_batch_size: 4\n"
    )
    assert main(["train", str(config), "--device", "cpu"]) == 0
    command = ["predict", str(out), "--data", str(source), "--out", str(rows)]
    command += ["--id-column", "__key__"]
    assert main(command) == 0
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"{number % 5:06}" for number in range(12)]
